"""Formats possible runs, and the needs of a comparison, as text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lm_trainer.ladder.fit.comparison_plan import ComparisonPlan
from lm_trainer.ladder.fit.narrowing import Proposal
from lm_trainer.ladder.fit.possible_runs import Price
from lm_trainer.ladder.tables import format_number, format_table

Pricing = Callable[[float], Price | None]
"""Computes the price of an amount of FLOPs."""


def proposals_text(proposals: Sequence[Proposal], within: float, level: float, pricing: Pricing) -> str:
    """Formats possible runs.

    Args:
        proposals: the runs, best first.
        within: half the width of the present interval, relative to the loss.
        level: confidence level of the interval.
        pricing: computes the price of each run.
    """
    head = ["run", "N", "tokens", "FLOPs", "interval +-"]
    rows = [
        [p.name, format_number(p.num_params), format_number(p.tokens), f"{p.flops:.3g}", f"{p.within:.3%}"]
        for p in proposals
    ]
    widest = min(proposals, key=lambda p: p.within)
    return "\n".join(
        [
            f"the {level:.0%} interval of the predicted loss is +-{within:.3%} now; with one more run:",
            _priced_table(head, rows, [pricing(p.flops) for p in proposals]),
            f"first: {proposals[0].name}, to +-{proposals[0].within:.3%} for {proposals[0].flops:.3g} FLOPs",
            f"narrowest: {widest.name}, to +-{widest.within:.3%} for {widest.flops:.3g} FLOPs",
        ]
    )


def comparison_plans_text(
    plans: Sequence[ComparisonPlan], *, flops: float, within: float, present: float, pricing: Pricing
) -> str:
    """Formats the needs of a comparison at `flops` FLOPs, whose half-width is to fall from `present` to `within`."""
    begin = f"at {flops:.3g} FLOPs the multiplier is known to within {present:.1%}"
    if present <= within:
        return f"{begin}, which is enough"
    head = ["sizes", "seeds of each", "to within", "more FLOPs"]
    rows = [
        [
            "the same" if plan.added_sizes == 0 else f"{plan.added_sizes} larger",
            f"{plan.seeds}" if plan.reached else f"{plan.seeds} are too few",
            f"{plan.within:.1%}",
            f"{plan.flops:.3g}",
        ]
        for plan in plans
    ]
    table = _priced_table(head, rows, [pricing(plan.flops) for plan in plans])
    return f"{begin}; to within {within:.1%}, both ladders together need:\n{table}"


def _priced_table(head: list[str], rows: list[list[str]], prices: Sequence[Price | None]) -> str:
    # All rows are priced for the same device, so either all have a price or none has.
    for row, price in zip(rows, prices, strict=True):
        if price is not None:
            row.append(f"{price.device_hours:,.3g}")
            row += [] if price.cost is None else [f"{price.cost:,.3g}"]
    if prices[0] is not None:
        head = [*head, "device hours", *([] if prices[0].cost is None else ["cost"])]
    return format_table(head, rows)
