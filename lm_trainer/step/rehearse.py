"""Rehearsal of a step: finds the programs it calls and the memory that a device holds, without running anything."""

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
from lm_trainer.step.dispatch.memory import PhaseBytes, memory_sort_key
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.recorder import Key, Measure, MemoryLimitExceeded, Recorder
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import abstract_state

MAX_MICROBATCHES = 256
"""Maximum number of microbatches per device that are rehearsed."""


@dataclass(frozen=True)
class StepRecord:
    """Programs of a step on one device."""

    phases: tuple[PhaseBytes, ...]
    """Peak memory of each program, in the order in which the programs first run."""
    runs: Mapping[Key, int]
    """Number of runs of each program."""


@dataclass(frozen=True)
class RehearsedStep:
    """Step of a run, prepared for a rehearsal."""

    step: Step
    """The step, which was built under `on_one_shard` only for the rehearsal."""
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """Shapes of all parameters by name."""
    tx: optax.GradientTransformation
    sharding: StateSharding
    averaged: bool
    """True if the state contains an average of the parameters."""
    interval: int
    """Number of steps from one curvature estimate to the next."""

    def record(self, row: Batch, platform: str, measure: Measure, limit: int | None = None) -> StepRecord:
        """Rehearses the step that takes the most memory, on the device that has the most microbatches.

        Args:
            row: a batch of one row.
            platform: platform of the step, which determines how many programs a device runs at once.
            measure: measures the results and memory of a program.
            limit: memory of a device in bytes. The rehearsal stops once the step exceeds it.
        """
        number = self._largest_step()
        plan = full_plan = self.step.plans.at(number)
        halvings = 0
        # The remaining count must be divisible by 4, because it is halved twice below.
        while (
            self.step.loops
            and self.step.devices.divide_microbatches(plan).max_terms > MAX_MICROBATCHES
            and plan.count % 8 == 0
        ):
            plan, halvings = halve_plan(plan), halvings + 1
        if not halvings:
            return self._record(number, plan, row, platform, measure, limit)
        quarter = halve_plan(halve_plan(plan))
        # The first record is dropped, because its step also creates the arrays that are made only once.
        plans = [quarter, quarter, halve_plan(plan), plan]
        records = [self._record(number, fewer, row, platform, measure, None) for fewer in plans]
        record = _extrapolate_record(records[1:], halvings)
        if all(size >= 0 for phase in record.phases for size in phase.parts.values()):
            return record
        # If the peak is at another point of the step when there are more microbatches, it cannot be extrapolated.
        return self._record(number, full_plan, row, platform, measure, limit)

    def _record(
        self, number: int, plan: MicrobatchPlan, row: Batch, platform: str, measure: Measure, limit: int | None
    ) -> StepRecord:
        step, mesh = self.step, self.sharding.mesh
        shards = batch_shards(mesh)
        side_by_side = programs_at_once(platform, shards, mesh.size // shards)
        at_once = min(side_by_side, step.devices.divide_microbatches(plan).max_terms)
        recorder = Recorder(measure, local_devices(mesh)[: mesh.size // shards], at_once, limit)
        with rehearsing(recorder), _with_plan(step, plan), contextlib.suppress(MemoryLimitExceeded):
            arrays = abstract_state(self.shapes, self.tx, self.sharding, averaged=self.averaged)
            state = recorder.create_abstract_arrays(arrays._replace(step=None), "state")._replace(step=number)
            step.prepare(row, number)
            rows = len(step.local_rows(number))
            batch = step.put(jax.tree.map(lambda x: np.broadcast_to(x[:1], (rows, *x.shape[1:])), row), number)
            step(state, batch, 0.0)
        return StepRecord(recorder.phases, recorder.runs)

    def _largest_step(self) -> int:
        """Returns the number of a step whose batch takes the most memory, with a curvature estimate if possible."""
        plans = self.step.plans
        largest = max(plans.values, key=memory_sort_key)
        start = plans.start_of(largest)
        estimated = -(-start // self.interval) * self.interval
        return estimated if plans.at(estimated) == largest else start


@contextlib.contextmanager
def _with_plan(step: Step, plan: MicrobatchPlan) -> Iterator[None]:
    """Makes a step divide every batch by `plan` in this context."""
    original, step.plans = step.plans, Piecewise.from_phases([(0, plan)])
    try:
        yield
    finally:
        step.plans = original


def halve_plan(plan: MicrobatchPlan) -> MicrobatchPlan:
    """Returns a plan with half as many microbatches of the same size."""
    return replace(plan, batch_size=plan.rows * (plan.count // 2), count=plan.count // 2)


def _extrapolate_record(records: list[StepRecord], doublings: int) -> StepRecord:
    """Extrapolates to a step that has 2^doublings times as many microbatches as the last record.

    The three records have n, 2n and 4n microbatches. Rows and activations grow linearly with the number of
    microbatches, and partial sums grow with its logarithm. If a program reaches its peak in a different run when there
    are more microbatches, its phase is only an estimate.
    """

    def extrapolate(one: int, two: int, four: int) -> int:
        # one = a + b n + c log2(n), where n is the number of microbatches of the first record.
        linear = (four - two) - (two - one)
        logarithmic = (two - one) - linear
        return four + 4 * linear * (2**doublings - 1) + logarithmic * doublings

    first, second = ({phase.name: phase.parts for phase in record.phases} for record in records[:2])

    def extrapolate_phase(name: str, parts: Mapping[str, int]) -> PhaseBytes:
        one, two = first.get(name, parts), second.get(name, parts)
        return PhaseBytes(
            name, {part: extrapolate(one.get(part, 0), two.get(part, 0), size) for part, size in parts.items()}
        )

    phases = [extrapolate_phase(phase.name, phase.parts) for phase in records[2].phases]
    one, two, four = (record.runs for record in records)
    # A program that is specific to one number of microbatches runs equally often for any number.
    runs = {key: extrapolate(one[key], two[key], n) if key in one and key in two else n for key, n in four.items()}
    return StepRecord(tuple(phases), runs)
