"""Numbers of rungs and seeds that a comparison of two recipes needs for an interval of a wanted width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.compare import Multiplier, loss_at_compute
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.narrowing import Rung, larger_rungs, remaining_variance

_MOST_SEEDS = 32
_ADDED_SIZES = (0, 1, 2)


@dataclass(frozen=True)
class ComparisonPlan:
    """More runs of both ladders, and the interval of the multiplier with them."""

    added_sizes: int
    """Number of sizes beyond the largest one that are added to both ladders."""
    seeds: int
    """Number of seeds of every size, with the ones that have been run."""
    within: float
    """Expected half-width of the interval of the multiplier, as a fraction: 0.05 is a factor of 1.05 either way."""
    reached: bool
    """True if the interval has the wanted width."""
    flops: float
    """Compute of the runs that are still to be made, in both ladders."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data at full precision."""
        return asdict(self)


def present_width(multiplier: Multiplier) -> float:
    """Returns the half-width of the interval of a multiplier, as a fraction.

    Raises:
        UserError: if the interval has no lower end, because B may never reach the loss of A.
    """
    range_ = multiplier.multiplier
    if range_.low <= 0:
        raise UserError(
            f"at {multiplier.flops:.3g} FLOPs B may never reach the loss of A, so that the multiplier has no interval; "
            "compare at less compute with --flops, or train larger rungs"
        )
    return float(np.sqrt(range_.high / range_.low) - 1)


def plan_comparison(
    fits: tuple[Fit, Fit], multiplier: Multiplier, within: float, rungs: tuple[Sequence[Rung], Sequence[Rung]]
) -> list[ComparisonPlan]:
    """Finds the smallest number of seeds that is enough, with up to two more sizes.

    Args:
        fits: the fits of both recipes.
        multiplier: their comparison at one compute budget.
        within: wanted half-width of the interval of the multiplier, as a fraction.
        rungs: the rungs of both ladders.

    Raises:
        UserError: if the width is not above 0, or the multiplier has no interval.
    """
    if not 0 < within < 1:
        raise UserError(f"--within {within:g}: it has to be above 0 and below 1, such as 0.05 for 5 %")
    present = np.log1p(present_width(multiplier))
    targets = [np.log(loss_at_compute(fit.draws, multiplier.flops, multiplier.tokens_per_param)) for fit in fits]
    variances = [float(np.var(target)) for target in targets]
    plans = []
    for added in _ADDED_SIZES:
        for more in range(_MOST_SEEDS):
            new = [_new_runs(fit, present_rungs, added, more) for fit, present_rungs in zip(fits, rungs, strict=True)]
            left = sum(
                variance * remaining_variance(fit, target, runs)
                for variance, fit, target, runs in zip(variances, fits, targets, new, strict=True)
            )
            width = float(np.expm1(present * np.sqrt(left / sum(variances))))
            if width <= within:
                break
        flops = sum(rung.flops * seeds for runs in new for rung, seeds in runs)
        plans.append(ComparisonPlan(added, _seeds(fits[0]) + more, width, width <= within, flops))
    return plans


def _new_runs(fit: Fit, rungs: Sequence[Rung], added: int, more: int) -> list[tuple[Rung, int]]:
    again = [(rung, more) for rung in rungs] if more else []
    return [*again, *((rung, _seeds(fit) + more) for rung in larger_rungs(rungs, added))]


def _seeds(fit: Fit) -> int:
    """Returns the mean number of runs per size."""
    return max(round(len(set(fit.points.runs)) / len(fit.points.sizes)), 1)
