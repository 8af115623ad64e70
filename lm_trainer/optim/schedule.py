"""Learning-rate schedules: closed-form functions of the step, evaluated on the host.

A schedule is one or more cycles of warm-up, a stable phase at the peak, and a decay to `min_lr_ratio` times the peak.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.optim.cycles import Cycle

ScheduleName = Literal["constant", "linear", "cosine", "inv_sqrt", "inv", "power"]

POWER_SCALE, POWER_EXPONENT = 4.6, -0.51
"""Constants a and b of the power schedule, fitted in its paper for GPT models under maximal update scaling."""


@dataclass(frozen=True)
class Constants:
    """Constants of the formulas of `Schedule`; each belongs to one shape."""

    exponent: float = 1.0
    """p of `cosine`."""
    timescale: float | None = None
    """T of `inv_sqrt`; None: the number of steps of the first warm-up."""
    power_scale: float = POWER_SCALE
    """a of `power`."""
    power_exponent: float = POWER_EXPONENT
    """b of `power`."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate at each step, counted from 0. After the last step it stays at the final value.

    The first warm-up is linear from 0 at its first step; later ones are linear from the final value of the previous
    cycle. Each warm-up ends at the initial value of the decay, which is also the value of the stable phase. Without a
    warm-up of later cycles, the learning rate jumps back to this value. With t the number of steps since the start of
    the decay, D its length and m `min_ratio`, the learning rate during the decay is the peak times

    - `constant`: 1;
    - `linear`: 1 - (1 - m) * t / D;
    - `cosine`: m + (1 - m) * ((1 + cos(pi * t / D)) / 2)^p, with p = 1 Loshchilov and Hutter 2017, equation 5;
    - `inv_sqrt`: max(m, sqrt(w / (w + t))) with w the steps of the first warm-up, at least 1, as in Vaswani et al.
      2017, equation 3; with a timescale T, max(m, min(1, sqrt(T / n))), n = t + the warm-up, at least 1, which starts
      below the peak if T is below the warm-up;
    - `inv`: 1 / (1 + (1 / m - 1) * t / D), linear in 1 / rate, as in Wen et al. 2024, arXiv 2410.05192;
    - `power`: B * a * n^b / peak, at least m and at most 1, with n the tokens since the start of the cycle, B the rows
      of the batch, by default a = 4.6 and b = -0.51, Shen et al. 2024, arXiv 2408.13359. It may start below the peak.

    In cycle i all values are multiplied by `peaks[i]`, if `peaks` is not empty.

    Raises:
        ValueError: if `inv` has a `min_ratio` of 0, `power` has no `tokens`, or the numbers of peaks and cycles differ.
    """

    shape: ScheduleName
    cycles: tuple[Cycle, ...]
    peak: float
    min_ratio: float
    tokens: TokenSchedule | None = None
    peaks: tuple[float, ...] = ()
    constants: Constants = Constants()

    def __post_init__(self) -> None:
        if self.peaks and len(self.peaks) != len(self.cycles):
            raise ValueError(f"cycle_peaks lists {len(self.peaks)} peaks for {len(self.cycles)} cycles")
        if self.shape == "inv" and self.min_ratio == 0:
            raise ValueError("lr_schedule 'inv' cannot decay to 0: set min_lr_ratio above 0")
        if self.shape == "power" and self.tokens is None:
            raise ValueError("lr_schedule 'power' depends on the number of tokens in each step, which must be given")

    def __call__(self, step: int) -> float:
        number = bisect.bisect_right(self.cycles, step, key=lambda cycle: cycle.start) - 1
        cycle = self.cycles[number]
        step = min(step, cycle.end)
        since = step - cycle.start
        if since >= cycle.warmup:
            return self.peak * self._fraction_of_peak(number, max(0, step - cycle.decay_start))
        low = self._fraction_of_peak(number - 1, self.cycles[number - 1].decay) if number else 0.0
        return self.peak * (low + (self._fraction_of_peak(number, 0) - low) * since / cycle.warmup)

    def _fraction_of_peak(self, number: int, since: int) -> float:
        """Returns the learning rate as a fraction of `peak`, `since` steps after the start of the decay of a cycle."""
        return (self.peaks[number] if self.peaks else 1.0) * self._decay_fraction(self.cycles[number], since)

    def _decay_fraction(self, cycle: Cycle, since: int) -> float:
        """Returns the decay as a fraction of the peak, `since` steps after its start."""
        # For a cycle without a decay, only the start of the decay is evaluated: 0 of 0 steps.
        done, slope = since / max(1, cycle.decay), 1 - self.min_ratio
        match self.shape:
            case "constant":
                return 1.0
            case "linear":
                return 1 - slope * done
            case "cosine":
                return self.min_ratio + slope * ((1 + math.cos(math.pi * done)) / 2) ** self.constants.exponent
            case "inv_sqrt" if self.constants.timescale is not None:
                count = max(1, cycle.warmup + since)
                return max(self.min_ratio, min(1.0, math.sqrt(self.constants.timescale / count)))
            case "inv_sqrt":
                width = max(1, self.cycles[0].warmup)
                return max(self.min_ratio, math.sqrt(width / (width + since)))
            case "inv":
                return 1 / (1 + (1 / self.min_ratio - 1) * done)
            case "power":
                return min(1.0, max(self.min_ratio, self._power_law_rate(cycle, cycle.decay_start + since) / self.peak))

    def _power_law_rate(self, cycle: Cycle, step: int) -> float:
        assert self.tokens is not None
        count = self.tokens.tokens_before(step) - self.tokens.tokens_before(cycle.start)
        scale, exponent = self.constants.power_scale, self.constants.power_exponent
        return self.tokens.batch.at(step) * scale * count**exponent if count else math.inf
