"""Forecasts of how much further rungs would narrow an interval.

The bootstrap gives draws of the law, and so draws of a prediction and of any measurement that could be made. If both
are close to normal, measurements leave V - c' (S + s^2 I)^-1 c of the variance V of the prediction (the conditional
variance of a normal distribution; Raiffa and Schlaifer 1961). Here c is the covariance of the prediction with the
measurements, S is the covariance of the measurements over the draws, and s^2 is the variance of their noise. No law is
refitted.

Dimensions: R draws, M measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import central_interval, student_t_factor
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.law import Law, training_flops
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.tables import format_number


@dataclass(frozen=True)
class Rung:
    """A run that is possible, with the checkpoints at which its loss is measured."""

    name: str
    num_params: float
    tokens: tuple[float, ...]
    """Tokens at each checkpoint to measure."""
    flops: float
    """Compute of the run in FLOPs; of its continuation alone if it continues a finished run."""


@dataclass(frozen=True)
class Proposal:
    """A possible run, and the interval of the prediction with it."""

    name: str
    num_params: float
    tokens: float
    """Length of the run."""
    flops: float
    within: float
    """Half the width of the interval of the predicted loss after the run, relative to the loss."""
    gain: float
    """Decrease of log `within` per FLOP."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the proposal as plain data at full precision."""
        return asdict(self)


def remaining_variance(fit: Fit, target_R: np.ndarray, new: Sequence[tuple[Rung, int]]) -> float:
    """Returns the fraction of the variance of `target_R` that is left after new runs.

    Args:
        fit: the fit to the present points.
        target_R: the quantity of interest for each draw of the fit (R,).
        new: the new runs, each with a number of seeds.
    """
    if not new:
        return 1.0
    num_params_M, tokens_M, seeds_M = np.array(
        [(rung.num_params, tokens, seeds) for rung, seeds in new for tokens in rung.tokens]
    ).T
    unique = fit.points.unique_tokens
    drawn: Law = fit.draws.select(np.s_[:, None])
    measured_RM = np.log(drawn.loss(num_params_M, tokens_M, None if unique is None else unique.max()))
    covariance = np.cov(np.column_stack([target_R, measured_RM]), rowvar=False)
    constants, level = len(fit.law.names), fit.settings.level
    present = student_t_factor(len(fit.points), level, constants)
    # The draws are wider than the noise by Student's factor, so the noise of a measurement is widened as well.
    noise_MM = np.diag((present * fit.noise) ** 2 / seeds_M)
    shared_M = covariance[0, 1:]
    # Least squares, because measurements without noise may determine each other.
    explained = shared_M @ np.linalg.lstsq(covariance[1:, 1:] + noise_MM, shared_M, rcond=None)[0]
    left = max(1 - explained / covariance[0, 0], 0.0) if covariance[0, 0] > 0 else 0.0
    # More points make the estimate of the noise better as well.
    later = student_t_factor(len(fit.points) + int(seeds_M.sum()), level, constants)
    return float(left * (later / present) ** 2)


def half_width(values: Any, level: float) -> float:
    """Returns half the width of the central interval of draws."""
    low, high = central_interval(values, level)
    return (high - low) / 2


def target_draws(fit: Fit, num_params: float, tokens: float, unique_tokens: float | None = None) -> np.ndarray:
    """Returns log L (R,) of a run for each draw of the law."""
    return np.log(fit.draws.loss(num_params, tokens, unique_tokens))


def propose(fit: Fit, target_R: np.ndarray, rungs: Sequence[Rung], *, budget: float | None = None) -> list[Proposal]:
    """Orders possible runs by how much each narrows the interval of a prediction for its compute.

    Args:
        fit: the fit to the present points.
        target_R: log L of the prediction for each draw, as from `target_draws`.
        rungs: the possible runs.
        budget: leaves out runs with more FLOPs, and orders by the narrowing alone.

    Raises:
        UserError: if no run is within the budget.
    """
    within = half_width(target_R, fit.settings.level)
    proposals = []
    for rung in rungs:
        if budget is not None and rung.flops > budget:
            continue
        left = remaining_variance(fit, target_R, [(rung, 1)])
        gain = -np.log(max(left, 1e-300)) / 2 / rung.flops
        proposals.append(
            Proposal(
                rung.name, rung.num_params, max(rung.tokens), rung.flops, float(within * np.sqrt(left)), float(gain)
            )
        )
    if not proposals:
        cheapest = min(rung.flops for rung in rungs)
        raise UserError(f"--budget {budget:g}: the cheapest run takes {cheapest:.3g} FLOPs")
    return sorted(proposals, key=lambda p: p.within if budget is not None else -p.gain)


def rungs_of_points(points: Points) -> list[Rung]:
    """Returns one rung for each size: a run of its longest length, with the measured lengths as checkpoints."""
    rungs = []
    for size in points.sizes:
        tokens = np.unique(points.tokens[points.num_params == size])
        flops = float(training_flops(size, tokens.max()))
        rungs.append(Rung(f"N {format_number(size)}", float(size), tuple(tokens.tolist()), flops))
    return rungs


def larger_rungs(rungs: Sequence[Rung], count: int) -> list[Rung]:
    """Returns rungs beyond the largest one, with the mean ratio of the sizes and the lengths per parameter of the
    largest one.
    """
    largest = max(rungs, key=lambda rung: rung.num_params)
    sizes = sorted(rung.num_params for rung in rungs)
    ratio = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    return [_scaled(largest, ratio**power) for power in range(1, count + 1)]


def _scaled(rung: Rung, ratio: float) -> Rung:
    size = rung.num_params * ratio
    tokens = tuple(ratio * value for value in rung.tokens)
    # Compute grows with the square, as 6 N D.
    return Rung(f"N {format_number(size)}", size, tokens, rung.flops * ratio**2)


def possible_rungs(points: Points) -> list[Rung]:
    """Returns runs that could follow the points: another seed and twice the length of each size, sizes between two
    neighbours, and one and two steps beyond the largest size.
    """
    present = rungs_of_points(points)
    candidates = [*further_runs(present), *(Rung(f"new size {r.name}", *_facts(r)) for r in larger_rungs(present, 2))]
    for smaller, larger in pairwise(present):
        between = _scaled(larger, float(np.sqrt(smaller.num_params / larger.num_params)))
        candidates.append(Rung(f"new size {between.name}", *_facts(between)))
    return candidates


def further_runs(present: Sequence[Rung]) -> list[Rung]:
    """Returns another seed, and twice the length, of each rung."""
    return [
        candidate
        for rung in present
        for candidate in (
            Rung(f"another seed of {rung.name}", *_facts(rung)),
            # A finished run continues, so twice its length takes its compute once more.
            Rung(f"{rung.name} to twice its length", rung.num_params, (2 * max(rung.tokens),), rung.flops),
        )
    ]


def _facts(rung: Rung) -> tuple[float, tuple[float, ...], float]:
    return rung.num_params, rung.tokens, rung.flops
