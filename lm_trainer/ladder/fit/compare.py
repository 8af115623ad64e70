"""Compute multipliers: how much compute one recipe saves compared with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import central_interval
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.law import FLOPS_PER_PARAM, Law
from lm_trainer.ladder.fit.predict import MAX_EXTRAPOLATION, Range, check_range
from lm_trainer.ladder.tables import format_table

_REACH = 30.0
"""Half the width of the initial interval of the bisection, in log FLOPs."""
_HALVINGS = 60
"""Number of bisection steps. The final interval is 60 / 2^60 = 5e-17 in log FLOPs, below the precision of a double."""


@dataclass(frozen=True)
class Multiplier:
    """Comparison of two recipes A and B at one compute budget of A."""

    flops: float
    loss: float
    """Loss of A at this compute budget."""
    difference: Range
    """Loss of B minus loss of A at this compute budget."""
    multiplier: Range
    """Compute of A divided by the compute that B needs for the same loss; 0 if B never reaches this loss."""
    ratio: float
    """Ratio of the compute budget to the compute of the largest rung of the smaller ladder."""
    tokens_per_param: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data at full precision."""
        return asdict(self)


def compare(
    a: Fit,
    b: Fit,
    *,
    flops: Sequence[float] = (),
    tokens_per_param: float | None = None,
    max_extrapolation: float = MAX_EXTRAPOLATION,
    extrapolate: bool = False,
) -> list[Multiplier]:
    """Computes the compute multiplier of B over A, if both are trained on `tokens_per_param` * N tokens.

    Args:
        a: the baseline recipe.
        b: the other recipe.
        flops: compute budgets (6 N D) of A. By default the middle and the end of the range that both ladders cover, and
            ten times the end.
        tokens_per_param: number of tokens per parameter; by default the geometric mean over all points.
        max_extrapolation: as in `lm_trainer.ladder.fit.predict.predict`.
        extrapolate: as in `lm_trainer.ladder.fit.predict.predict`.

    Raises:
        UserError: if the fits are for different metrics, or a compute budget is too far beyond the rungs.
    """
    if a.points.metric != b.points.metric:
        raise UserError(f"A is a fit of {a.points.metric}, B of {b.points.metric}; a comparison needs one metric")
    if a.settings.level != b.settings.level:
        raise UserError(f"A has intervals of {a.settings.level:.0%}, B of {b.settings.level:.0%}; fit with one --level")
    # Ratios are averaged in log space, where power laws are linear.
    ratios = np.concatenate([f.points.tokens / f.points.num_params for f in (a, b)])
    per_param = tokens_per_param or float(np.exp(np.log(ratios).mean()))
    # A comparison extrapolates only as far as the fit with the smaller range allows.
    nearer = a if a.max_flops < b.max_flops else b
    if not flops:
        least = max(float(f.points.flops.min()) for f in (a, b))
        middle = float(np.sqrt(least * nearer.max_flops))
        flops = [*([middle] if least < nearer.max_flops else []), nearer.max_flops, 10 * nearer.max_flops]
    multipliers = []
    for value in flops:
        ratio = check_range(nearer, value, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
        multipliers.append(_compare_at_compute(a, b, value, per_param, ratio))
    return multipliers


def _compare_at_compute(a: Fit, b: Fit, flops: float, per_param: float, ratio: float) -> Multiplier:
    level, count = a.settings.level, min(a.settings.draws, b.settings.draws)
    # Shuffled, because two bootstraps with the same seed draw the same points.
    order = np.random.default_rng([a.settings.seed, b.settings.seed, 4]).permutation(count)
    draws_a, draws_b = a.draws.select(slice(count)), b.draws.select(order)
    loss_a, drawn_a = (loss_at_compute(law, flops, per_param) for law in (a.law, draws_a))
    loss_b, drawn_b = (loss_at_compute(law, flops, per_param) for law in (b.law, draws_b))
    return Multiplier(
        flops,
        float(loss_a),
        Range(float(loss_b - loss_a), *central_interval(drawn_b - drawn_a, level)),
        Range(
            float(_solve_multiplier(b.law, loss_a, flops, per_param)),
            *central_interval(_solve_multiplier(draws_b, drawn_a, flops, per_param), level),
        ),
        ratio,
        per_param,
    )


def loss_at_compute(law: Law, flops: Any, per_param: float) -> Any:
    """Computes the loss of a run with `flops` FLOPs and `per_param` tokens per parameter."""
    # C = 6 N D with D = per_param N.
    num_params = np.sqrt(flops / (FLOPS_PER_PARAM * per_param))
    return law.loss(num_params, per_param * num_params)


def _solve_multiplier(law: Law, loss: Any, flops: float, per_param: float) -> Any:
    """Divides `flops` by the compute at which the law reaches `loss`, found by bisection as loss falls with compute."""
    low, high = (np.full(np.shape(loss), np.log(flops) + sign * _REACH) for sign in (-1, 1))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = loss_at_compute(law, np.exp(middle), per_param) > loss
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    # A law whose floor E is above the loss never reaches it with any compute.
    reached = loss_at_compute(law, np.exp(np.log(flops) + _REACH), per_param) <= loss
    return np.where(reached, np.exp(np.log(flops) - (low + high) / 2), 0.0)


def format_comparison(multipliers: Sequence[Multiplier], level: float) -> str:
    """Formats the comparisons as a table for the terminal."""
    rows = [
        [
            f"{m.flops:.3g}",
            f"{m.ratio:.3g}",
            f"{m.loss:.4f}",
            *(f"{x:+.4f}" for x in (m.difference.value, m.difference.low, m.difference.high)),
            *(f"{x:.3f}" for x in (m.multiplier.value, m.multiplier.low, m.multiplier.high)),
        ]
        for m in multipliers
    ]
    head = ["FLOPs", "/ largest", "loss of A", "B - A", "low", "high", "multiplier", "low", "high"]
    return format_table(head, rows) + "\n" + verdict(multipliers, level)


def verdict(multipliers: Sequence[Multiplier], level: float) -> str:
    """Returns the conclusion that the intervals allow, as a sentence."""
    better = [m.multiplier.low > 1 for m in multipliers]
    worse = [m.multiplier.high < 1 for m in multipliers]
    if all(better):
        return f"B needs less compute for the loss of A ({level:.0%})"
    if all(worse):
        return f"B needs more compute for the loss of A ({level:.0%})"
    if any(better) or any(worse):
        return f"the recipes differ at some of these computes only ({level:.0%})"
    return f"no difference is shown: every {level:.0%} interval holds 1; more rungs or seeds would narrow it"
