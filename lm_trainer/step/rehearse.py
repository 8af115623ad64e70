"""A step that is rehearsed: what it calls, and what a device holds meanwhile, without running anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np
import optax

from lm_trainer.core.batch import Batch
from lm_trainer.core.piecewise import Piecewise
from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.rehearsal import local_devices, rehearsing
from lm_trainer.step.base import Step
from lm_trainer.step.dispatch.memory import PhaseBytes, taken_memory
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.recorder import Enough, Key, Measure, Recorder
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import abstract_state

MOST = 256
"""Microbatches of a device that are rehearsed."""


@dataclass(frozen=True)
class StepRecord:
    """The programs of a step on one device."""

    phases: tuple[PhaseBytes, ...]
    """The memory while each program runs, where that is most, in the order of first runs."""
    runs: Mapping[Key, int]
    """Runs of each program."""


@dataclass(frozen=True)
class RehearsedStep:
    """The step of a run, to be rehearsed."""

    step: Step
    """Built under `on_one_shard`, for nothing else."""
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """The shapes of all parameters."""
    tx: optax.GradientTransformation
    sharding: StateSharding
    averaged: bool
    """True if the state has an average of the parameters."""
    interval: int
    """Steps from one estimate of curvature to the next."""

    def record(self, row: Batch, platform: str, measure: Measure, limit: int | None = None) -> StepRecord:
        """Rehearses the step that takes most memory, on the device that has most to do.

        Args:
            row: a batch of one row.
            platform: on which the step is to run; how many programs a device runs at once depends on it.
            measure: tells what a program returns and takes.
            limit: bytes of a device, above which the rest of the step does not matter.
        """
        number = self._largest_step()
        plan = full_plan = self.step.plans.at(number)
        halvings = 0
        # What is left can be halved twice more.
        while self.step.loops and self.step.devices.shares(plan).most > MOST and plan.count % 8 == 0:
            plan, halvings = halved(plan), halvings + 1
        if not halvings:
            return self._record(number, plan, row, platform, measure, limit)
        quarter = halved(halved(plan))
        # The first one makes the numbers that a step makes once.
        plans = [quarter, quarter, halved(plan), plan]
        records = [self._record(number, fewer, row, platform, measure, None) for fewer in plans]
        record = _extrapolated(records[1:], halvings)
        if all(size >= 0 for phase in record.phases for size in phase.parts.values()):
            return record
        # Where a device holds most at another point with more microbatches, nothing follows from fewer of them.
        return self._record(number, full_plan, row, platform, measure, limit)

    def _record(
        self, number: int, plan: MicrobatchPlan, row: Batch, platform: str, measure: Measure, limit: int | None
    ) -> StepRecord:
        step, mesh = self.step, self.sharding.mesh
        shards = batch_shards(mesh)
        side_by_side = programs_at_once(platform, shards, mesh.size // shards)
        at_once = min(side_by_side, step.devices.shares(plan).most)
        recorder = Recorder(measure, local_devices(mesh)[: mesh.size // shards], at_once, limit)
        with rehearsing(recorder), _with_plan(step, plan), contextlib.suppress(Enough):
            arrays = abstract_state(self.shapes, self.tx, self.sharding, averaged=self.averaged)
            state = recorder.hold(arrays._replace(step=None), "state")._replace(step=number)
            step.prepare(row, number)
            rows = len(step.local_rows(number))
            batch = step.put(jax.tree.map(lambda x: np.broadcast_to(x[:1], (rows, *x.shape[1:])), row), number)
            step(state, batch, 0.0)
        return StepRecord(recorder.phases, recorder.runs)

    def _largest_step(self) -> int:
        """The number of a step with the batch that takes most memory, with an estimate of curvature if it can be."""
        plans = self.step.plans
        largest = max(plans.values, key=taken_memory)
        start = plans.start_of(largest)
        estimated = -(-start // self.interval) * self.interval
        return estimated if plans.at(estimated) == largest else start


@contextlib.contextmanager
def _with_plan(step: Step, plan: MicrobatchPlan) -> Iterator[None]:
    """Has every batch of a step divided so."""
    before, step.plans = step.plans, Piecewise.make([(0, plan)])
    try:
        yield
    finally:
        step.plans = before


def halved(plan: MicrobatchPlan) -> MicrobatchPlan:
    """Half the microbatches, of as many rows."""
    return replace(plan, batch_size=plan.rows * (plan.count // 2), count=plan.count // 2)


def _extrapolated(records: list[StepRecord], doublings: int) -> StepRecord:
    """The record of a step with 2^doublings times the microbatches of the last of three, each of which has twice those
    of the one before.

    Rows and activations grow with the number of microbatches, and partial sums with its logarithm. Where a program
    takes most at another of its runs with more microbatches, its phase is an estimate.
    """

    def at(one: int, two: int, four: int) -> int:
        # one = a + b n + c log2(n), where n is the number of microbatches of the first.
        linear = (four - two) - (two - one)
        logarithmic = (two - one) - linear
        return four + 4 * linear * (2**doublings - 1) + logarithmic * doublings

    first, second = ({phase.name: phase.parts for phase in record.phases} for record in records[:2])

    def extrapolated(name: str, parts: Mapping[str, int]) -> PhaseBytes:
        one, two = first.get(name, parts), second.get(name, parts)
        return PhaseBytes(name, {part: at(one.get(part, 0), two.get(part, 0), size) for part, size in parts.items()})

    phases = [extrapolated(phase.name, phase.parts) for phase in records[2].phases]
    one, two, four = (record.runs for record in records)
    # A program of its own for each number of microbatches runs as often for any.
    runs = {key: at(one[key], two[key], n) if key in one and key in two else n for key, n in four.items()}
    return StepRecord(tuple(phases), runs)
