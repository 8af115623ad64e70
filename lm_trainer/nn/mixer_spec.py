"""Descriptions of sequence mixers: the sublayer of a layer that combines positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from lm_trainer.nn.rope_spec import RopeSpec
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, NormSpec, ScoreSpec


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values of all heads are
    linear maps of one small vector per position, the latent. A cache stores only latents.

    A part of each query and of a key that all heads share is rotated; the remaining part of the key is computed from
    the latent and has no positions.
    """

    num_heads: int
    latent_dim: int
    """Size of the latent from which keys and values are computed."""
    plain_dim: int
    """Number of dimensions of a query and key without positions."""
    rotary_dim: int
    """Number of dimensions of a query and key that are rotated."""
    value_dim: int
    """Size of the value vectors of one head."""
    rope: RopeSpec
    norm: NormSpec
    """Norm of latents."""
    query_latent_dim: int | None = None
    """Size of a second latent, from which queries are computed; None: queries are computed from the input."""
    bias: bool = False
    """Add biases to the maps from the input to latents, and to the output."""
    scores: ScoreSpec = ScoreSpec()  # noqa: RUF009 - frozen

    @property
    def head_dim(self) -> int:
        """Size of the query and key vectors of one head."""
        return self.plain_dim + self.rotary_dim

    @property
    def expanded(self) -> AttentionSpec:
        """The attention that is computed from the queries, keys and values of all heads."""
        return AttentionSpec(
            self.num_heads, self.head_dim, bias=False, out_bias=self.bias, scores=self.scores, value_dim=self.value_dim
        )

    @property
    def absorbed(self) -> AttentionSpec:
        """The same attention with latents as the only keys and values, for decoding with a cache."""
        size, scale = self.latent_dim + self.rotary_dim, self.scores.scale
        # The default scale belongs to the size of the expanded queries and keys.
        scores = replace(self.scores, scale=self.head_dim**-0.5 if scale is None else scale)
        return AttentionSpec(self.num_heads, size, 1, bias=False, scores=scores, value_dim=self.latent_dim)


@dataclass(frozen=True)
class StateSpaceSpec:
    """Selective state-space model with a scalar decay per head (Dao and Gu 2024, arXiv 2405.21060, section 7).

    Its state in a cache does not grow with the number of positions.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    """Size of the state of each dimension of a head."""
    norm: NormSpec
    """Norm of the result after its product with the gate."""
    num_groups: int = 1
    """Number of groups of heads. The heads of a group share the vectors that write to the state and read from it."""
    norm_groups: int = 1
    """Number of groups of dimensions that the norm normalizes separately."""
    conv_width: int = 4
    """Number of positions that the convolutions read."""
    conv_bias: bool = True
    bias: bool = False
    """Add biases to the linear maps of input and result."""
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    """Bounds of the time step."""
    time_step_range: tuple[float, float, float] = (0.001, 0.1, 1e-4)
    """Lowest and highest initial time step, and a lower bound of it."""
    chunk_size: int = 256
    """Number of positions that are computed at once."""


@dataclass(frozen=True)
class DeltaSpec:
    """Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464): linear attention with a decay and the delta rule.

    Its state in a cache does not grow with the number of positions.
    """

    num_heads: int
    """Number of heads of values."""
    num_key_heads: int
    """Number of heads of queries and keys; each serves num_heads / num_key_heads heads of values."""
    key_dim: int
    """Size of a query and of a key."""
    value_dim: int
    """Size of a value."""
    norm: NormSpec
    """Norm of the result of each head, before its product with the gate."""
    conv_width: int = 4
    """Number of positions that the convolutions of queries, keys and values read."""
    chunk_size: int = 64
    """Number of positions that are computed at once."""
    separate_maps: bool = False
    """Use one linear map for each of queries, keys, values, gates, rates and decays, instead of one for the first four
    and one for the last two, with outputs grouped by head of keys."""


Mixer = AttentionSpec | LatentSpec | StateSpaceSpec | DeltaSpec
"""A sequence mixer."""


def softmax_spec(mixer: Mixer) -> AttentionSpec | None:
    """Returns the attention, with softmax of scores, that a mixer computes in training; None for other mixers."""
    match mixer:
        case AttentionSpec():
            return mixer
        case LatentSpec():
            return mixer.expanded
    return None


def softmax_specs(blocks: Iterable[BlockSpec]) -> list[AttentionSpec]:
    """Returns `softmax_spec` of each layer that has one."""
    specs = (softmax_spec(block.mixer) for block in blocks)
    return [spec for spec in specs if spec is not None]


def cache_sizes(mixer: Mixer) -> tuple[int, int, int] | None:
    """Returns the number of heads of the keys in a cache, their size, and the size of the values; None if the mixer
    keeps no keys of its own.
    """
    match mixer:
        case AttentionSpec():
            return (mixer.kv_heads, mixer.head_dim, mixer.value_size) if mixer.has_keys else None
        case LatentSpec():
            # The rotated part of the key takes the place of keys, and the latent the place of values.
            return 1, mixer.rotary_dim, mixer.latent_dim
    return None


class ArraySpec(NamedTuple):
    """One array of the state of a row."""

    shape: tuple[int, ...]
    float32: bool = False
    """Float32 for any compute dtype."""


def state_arrays(mixer: Mixer) -> tuple[ArraySpec, ...]:
    """Returns the arrays that a mixer keeps of all earlier positions of a row; none if it keeps keys and values."""
    match mixer:
        case StateSpaceSpec():
            before, groups = mixer.conv_width - 1, mixer.num_groups
            heads = mixer.num_heads // groups
            of_group = ArraySpec((before, groups, mixer.state_dim))
            state = ArraySpec((groups, heads, mixer.state_dim, mixer.head_dim), float32=True)
            return ArraySpec((before, mixer.num_heads, mixer.head_dim)), of_group, of_group, state
        case DeltaSpec():
            before, groups = mixer.conv_width - 1, mixer.num_key_heads
            of_key = ArraySpec((before, groups, mixer.key_dim))
            of_value = ArraySpec((before, mixer.num_heads, mixer.value_dim))
            state = ArraySpec((groups, mixer.num_heads // groups, mixer.key_dim, mixer.value_dim), float32=True)
            return of_key, of_key, of_value, state
    return ()
