"""The points and marks of schedule plots, computed from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lm_trainer.checkpoint.policy import KeepEvery
from lm_trainer.core.piecewise import Piecewise, to_piecewise
from lm_trainer.optim.schedule import Schedule
from lm_trainer.run.config.run_config import RunConfig

_SAMPLES = 1000
"""Maximum number of points of a learning rate curve, in addition to the corners of its phases."""


class Curve(NamedTuple):
    """Points connected by straight lines. A jump has two points at the same step."""

    name: str
    points: tuple[tuple[int, float], ...]


class Panel(NamedTuple):
    """One panel of a plot. All panels have the steps of the run as their horizontal axis."""

    title: str
    curves: tuple[Curve, ...]


class Marks(NamedTuple):
    """Steps that are marked in every panel."""

    warmups: tuple[tuple[int, int], ...]
    """First step of each warm-up, and the first step after it."""
    minima: tuple[int, ...]
    """Steps at which decays end."""
    checkpoints: tuple[int, ...]
    """Steps of the permanent checkpoints, and of the last checkpoint."""


class SchedulePlot(NamedTuple):
    """Panels and marks of a run of `num_steps` steps."""

    num_steps: int
    panels: tuple[Panel, ...]
    marks: Marks


def plot_schedules(config: RunConfig) -> SchedulePlot:
    """Computes the curves of a configuration's learning rate, batch size and mixture weights. Needs no device."""
    trainer, data = config.trainer, config.data
    total, rate = trainer.num_train_steps, config.learning_rate()
    panels = [
        Panel("learning rate", (Curve("learning rate", rate_points(rate, total)),)),
        Panel("batch size", (Curve("batch size", _piecewise_points(to_piecewise(trainer.train_batch_size), total)),)),
    ]
    if data.configs:
        starts, shares = zip(*data.stages, strict=True)
        weights = [tuple(count / sum(counts) for count in counts) for counts in shares]
        columns = zip(data.trained, zip(*weights, strict=True), strict=True)
        curves = tuple(Curve(name, _piecewise_points(Piecewise(starts, values), total)) for name, values in columns)
        panels.append(Panel("mixture weights", curves))
    return SchedulePlot(total, tuple(panels), _find_marks(rate, trainer.checkpointer.keep, total))


def rate_points(rate: Schedule, total: int) -> tuple[tuple[int, float], ...]:
    """Samples the learning rate of a run of `total` steps at its corners, and at even intervals between them."""
    # Evenly spaced points would miss corners, such as the peak of a short warm-up.
    corners = {
        step
        for cycle in rate.cycles
        # Up to the last step of a cycle, because the next cycle begins at its end.
        for step in (cycle.start, cycle.start + cycle.warmup, cycle.decay_start, cycle.end - 1)
    }
    even = {(total - 1) * index // _SAMPLES for index in range(_SAMPLES + 1)}
    return tuple((step, rate(step)) for step in sorted(corners | even) if 0 <= step < total)


def _piecewise_points(values: Piecewise[int] | Piecewise[float], total: int) -> tuple[tuple[int, float], ...]:
    """Returns both ends of each constant segment of a piecewise constant value."""
    points: list[tuple[int, float]] = []
    for start, end, value in zip(values.starts, (*values.starts[1:], total), values.values, strict=True):
        if start < total:
            points += [(start, value), (min(end, total), value)]
    return tuple(points)


def _find_marks(rate: Schedule, keep: Sequence[KeepEvery], total: int) -> Marks:
    return Marks(
        warmups=tuple((cycle.start, cycle.start + cycle.warmup) for cycle in rate.cycles if cycle.warmup),
        minima=tuple(cycle.end for cycle in rate.cycles if cycle.decay and rate.shape != "constant"),
        checkpoints=(*(step for step in _permanent_steps(keep, total) if step < total), total),
    )


def _permanent_steps(keep: Sequence[KeepEvery], total: int) -> Iterator[int]:
    # As in `is_permanent`, each entry applies to the steps after the previous entry, and multiples count from step 0.
    covered = 0
    for entry in keep:
        until = total if entry.until is None else min(entry.until, total)
        yield from range((covered // entry.every + 1) * entry.every, until + 1, entry.every)
        covered = max(covered, until)
