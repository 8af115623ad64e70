"""The learning rate of a size as a picture, with its periods and checkpoints."""

from __future__ import annotations

from lm_trainer.ladder.recipe import RunConfigurator
from lm_trainer.plot import Curve, Marks, Panel, SchedulePlot
from lm_trainer.plot.curves import rate_points


def rung_plot(recipe: RunConfigurator, num_params: int, batch_size: int) -> SchedulePlot:
    """What is drawn of a run; the marked checkpoints are those that the ladder needs."""
    schedule = recipe.configure_lr_scheduler(num_params, batch_size)
    steps = recipe.configure_duration(num_params, batch_size) // batch_size
    checkpoints = [tokens // batch_size for tokens, _ in recipe.configure_checkpoint_intervals(num_params, batch_size)]
    marks = Marks(
        warmups=tuple((cycle.start, cycle.start + cycle.warmup) for cycle in schedule.cycles if cycle.warmup),
        minima=tuple(cycle.end for cycle in schedule.cycles),
        checkpoints=tuple(checkpoints),
    )
    panel = Panel("learning rate", (Curve("learning rate", rate_points(schedule, steps)),))
    return SchedulePlot(steps, (panel,), marks)
