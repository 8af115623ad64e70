"""Plans and metrics as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_trainer.ladder.plan import RungPlan


def plan_table(plans: Sequence[RungPlan]) -> str:
    """Formats a table with one line per size and a line with the sum."""
    head = ["size", "body", "embedding", "total", "N", "tokens", "steps", "batch", "peak lr", "FLOPs", "GiB/device"]
    rows = [
        [
            plan.size,
            format_number(plan.body_params),
            format_number(plan.embedding_params),
            format_number(plan.model_params),
            format_number(plan.num_params),
            format_number(plan.tokens),
            f"{plan.steps:,}",
            f"{plan.batch_size:,}",
            f"{plan.learning_rate:.3e}",
            f"{plan.flops:.2e}",
            f"{(plan.state_bytes + plan.activation_bytes) / 2**30:.3g}",
            *([] if plan.hours is None else [f"{plan.hours:,.3g}" if plan.hours < 100 else f"{plan.hours:,.0f}"]),
            *([] if plan.cost is None else [f"{plan.cost:,.0f}"]),
        ]
        for plan in plans
    ]
    # All sizes are planned for the same kind of device, so either all have hours or none has.
    if plans[0].hours is not None:
        head.append("hours")
    if plans[0].cost is not None:
        head.append("cost")
    total = sum(plan.flops for plan in plans)
    lines = [format_table(head, rows), f"all: {total:.3g} FLOPs"]
    if plans[0].hours is not None:
        lines[-1] += f", {sum((plan.hours or 0) * plan.devices for plan in plans):,.1f} device hours"
    if plans[0].cost is not None:
        lines[-1] += f", cost {sum(plan.cost or 0 for plan in plans):,.0f}"
    return "\n".join(lines)


def metrics_table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a table of the losses at every checkpoint."""
    losses = sorted({key for row in rows for key in row if key == "train/loss" or key.startswith("eval/")})
    head = ["size", "seed", "checkpoint", "step", "tokens", *losses]
    cells = [
        [
            str(row["size"]),
            str(row["seed"]),
            str(row["name"]),
            f"{row['step']:,}",
            f"{row['tokens']:,}",
            *(f"{row[key]:.4f}" if key in row else "" for key in losses),
        ]
        for row in rows
    ]
    return format_table(head, cells) + "\n"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns the columns of a table. The first column is left-aligned, and all others are right-aligned."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    # The first column is padded on its right.
    lines = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in (head, *rows)]
    return "\n".join("  ".join([line[0].strip().ljust(widths[0]), *line[1:]]).rstrip() for line in lines)


def format_number(number: float) -> str:
    """Formats a number with four significant digits and a suffix, such as 190.4M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"
