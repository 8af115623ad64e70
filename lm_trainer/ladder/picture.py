"""Plots the learning rate of a size, with its periods and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from lm_trainer.optim.schedule import Schedule
from lm_trainer.plot import Curve, Marks, Panel, SchedulePlot
from lm_trainer.plot.curves import rate_points


def rate_plot(schedule: Schedule, steps: int, checkpoints: Sequence[int]) -> SchedulePlot:
    """Plots the learning rate over `steps`, with marks at the ladder's checkpoints."""
    marks = Marks(
        warmups=tuple((cycle.start, cycle.start + cycle.warmup) for cycle in schedule.cycles if cycle.warmup),
        minima=tuple(cycle.end for cycle in schedule.cycles),
        checkpoints=tuple(checkpoints),
    )
    panel = Panel("learning rate", (Curve("learning rate", rate_points(schedule, steps)),))
    return SchedulePlot(steps, (panel,), marks)
