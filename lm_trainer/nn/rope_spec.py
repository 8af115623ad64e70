"""Description of rotary positions as plain values; a part of `lm_trainer.nn.spec`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Divides all rope frequencies by a factor, so that positions are interpolated (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class WavelengthScaling:
    """Divides only the frequencies of long wavelengths, with a smooth transition (Grattafiori et al. 2024)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    """Wavelengths above `original_positions / low_freq_factor` are divided, and wavelengths below `original_positions /
    high_freq_factor` are unchanged."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp over the dimensions, from unchanged to divided frequencies."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    """Factor that multiplies both cosine and sine."""
    whole_dims: bool = True
    """Round the ends of the ramp outwards to whole dimensions."""


@dataclass(frozen=True)
class LongRopeScaling:
    """Divides the frequency of each pair of dimensions by a separate factor (LongRoPE, Ding et al. 2024)."""

    factors: tuple[float, ...]
    magnitude: float
    """Factor that multiplies both cosine and sine."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021)."""

    theta: float = 10_000.0
    fraction: float = 1.0
    """Fraction of the dimensions of each head that are rotated, starting from the first."""
    scaling: LinearScaling | WavelengthScaling | YarnScaling | LongRopeScaling | None = None
    interleaved: bool = False
    """Adjacent dimensions are the coordinates of a rotation, instead of dimension i of both halves of a head."""
    backward: bool = False
    """Rotate in the opposite direction."""
    over_head: bool = False
    """Pair the dimensions, and derive the wavelengths, over all of a head; of these pairs, `fraction` are rotated."""
