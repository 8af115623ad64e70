"""Learning-rate schedules: closed-form functions of the step number, evaluated on the host.

A schedule is warm-up, then a stable phase at the peak, then a decay to `min_lr_ratio` times the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from lm_trainer.core.config import fraction_or_steps

Schedule = Callable[[int], float]
ScheduleName = Literal["constant", "linear", "cosine", "inv_sqrt", "inv"]


class Phases(NamedTuple):
    """Lengths of the phases, in steps."""

    warmup: int
    stable: int
    decay: int


def plan_phases(warmup: float, decay: float | None, total: int) -> Phases:
    """Splits `total` steps; `warmup` and `decay` are fractions (floats up to 1.0) or numbers of steps.

    Without a `decay` everything after the warm-up decays.

    Raises:
        ValueError: when the phases do not fit into `total` steps.
    """
    warmup_steps = fraction_or_steps(warmup, total)
    decay_steps = max(0, total - warmup_steps) if decay is None else fraction_or_steps(decay, total)
    stable = total - warmup_steps - decay_steps
    if stable < 0:
        raise ValueError(
            f"warmup ({warmup_steps} steps) and decay ({decay_steps} steps) do not fit into {total} training steps"
        )
    return Phases(warmup_steps, stable, decay_steps)


def build_schedule(name: ScheduleName, phases: Phases, *, peak: float, min_ratio: float) -> Schedule:
    """The learning rate at each step, counted from 0.

    Warm-up is linear from 0 at step 0 to the peak at step `phases.warmup`. With t the steps since the decay began and
    D its length, the decay is, m being `min_ratio`:

    - `constant`: the peak;
    - `linear`: peak * (1 - (1 - m) * t / D);
    - `cosine`: peak * (m + (1 - m) * (1 + cos(pi * t / D)) / 2), Loshchilov and Hutter 2017, equation 5;
    - `inv_sqrt`: peak * max(m, sqrt(w / (w + t))) with w the warm-up steps (at least 1), as in Vaswani et al. 2017;
    - `inv`: peak / (1 + (1 / m - 1) * t / D), which reaches m at the end; m = 0 is an error.

    After the last step the final value is held.

    Raises:
        ValueError: for `inv` with `min_ratio` 0.
    """
    if name == "inv" and min_ratio == 0:
        raise ValueError("lr_schedule 'inv' cannot decay to 0: set min_lr_ratio above 0")
    slope = 1 - min_ratio
    steepness = 1 / min_ratio - 1 if min_ratio else 0.0

    def decayed(since: int) -> float:
        done = since / phases.decay
        match name:
            case "constant":
                return 1.0
            case "linear":
                return 1 - slope * done
            case "cosine":
                return min_ratio + slope * (1 + math.cos(math.pi * done)) / 2
            case "inv_sqrt":
                width = max(1, phases.warmup)
                return max(min_ratio, math.sqrt(width / (width + since)))
            case "inv":
                return 1 / (1 + steepness * done)

    def learning_rate(step: int) -> float:
        if step < phases.warmup:
            return peak * step / phases.warmup
        since = step - phases.warmup - phases.stable
        if since < 0 or phases.decay == 0:
            return peak
        return peak * decayed(min(since, phases.decay))

    return learning_rate
