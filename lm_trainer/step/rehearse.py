"""A step that is rehearsed: what it calls, and what a device holds meanwhile, without running anything."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
import optax

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.rehearsal import local_devices, rehearsing
from lm_trainer.step.base import Step
from lm_trainer.step.dispatch.memory import PhaseBytes, taken_memory
from lm_trainer.step.dispatch.recorder import Enough, Key, Measure, Recorder
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import abstract_state


@dataclass(frozen=True)
class StepRecord:
    """The programs of a step on one device."""

    phases: tuple[PhaseBytes, ...]
    """The memory while each program runs, where that is most, in the order of first runs."""
    runs: Mapping[Key, int]
    """How often each program runs."""


def rehearse(  # noqa: PLR0913 - what a step is computed from
    step: Step,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    sharding: StateSharding,
    row: Batch,
    platform: str,
    measure: Measure,
    *,
    averaged: bool = False,
    interval: int = 1,
    limit: int | None = None,
) -> StepRecord:
    """Rehearses the step of a run that takes most memory, on the device that has most to do.

    Args:
        step: built under `on_one_shard`, for nothing else.
        shapes: of all parameters.
        tx: the optimizer.
        sharding: of the state.
        row: a batch of one row.
        platform: on which the step is to run; how many programs a device runs at once depends on it.
        measure: tells what a program returns and takes.
        averaged: whether the state has an average of the parameters.
        interval: steps from one estimate of curvature to the next.
        limit: bytes of a device, above which the rest of the step does not matter.
    """
    number, mesh = _largest_step(step, interval), sharding.mesh
    plan, shards = step.plans.at(number), batch_shards(mesh)
    side_by_side = programs_at_once(platform, shards, mesh.size // shards)
    at_once = min(side_by_side, step.devices.shares(plan).most)
    recorder = Recorder(measure, local_devices(mesh)[: mesh.size // shards], at_once, limit)
    with rehearsing(recorder), contextlib.suppress(Enough):
        shapes_of_state = abstract_state(shapes, tx, sharding, averaged=averaged)
        state = recorder.hold(shapes_of_state._replace(step=None), "state")._replace(step=number)
        step.prepare(row, number)
        rows = len(step.local_rows(number))
        batch = step.put(jax.tree.map(lambda x: np.broadcast_to(x[:1], (rows, *x.shape[1:])), row), number)
        step(state, batch, 0.0)
    return StepRecord(recorder.phases, recorder.runs)


def _largest_step(step: Step, interval: int) -> int:
    """The number of a step with the batch that takes most memory, in which curvature is estimated if it can be."""
    largest = max(step.plans.values, key=taken_memory)
    start = step.plans.starts[step.plans.values.index(largest)]
    estimated = -(-start // interval) * interval
    return estimated if step.plans.at(estimated) == largest else start
