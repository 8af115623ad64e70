"""The bytes that one device holds in each phase of a training step, from shapes and from XLA's memory analysis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.ordered_sum import most_held
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.config import RunConfig
from lm_trainer.run.program import Program, build_program
from lm_trainer.step.executable import Executable
from lm_trainer.step.microbatch import MicrobatchPlan
from lm_trainer.step.state import abstract_state


@dataclass(frozen=True)
class ProgramBytes:
    """What a compiled program takes on each of its devices, in bytes."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that lie where arguments were."""
    temporary: int
    """Only while it runs."""

    @classmethod
    def of(cls, program: Executable) -> ProgramBytes:
        """XLA's memory analysis.

        Raises:
            UserError: when the backend has none.
        """
        found = program.memory()
        if found is None:
            raise UserError(f"XLA does not say how much memory a program takes on {jax.default_backend()}")
        return cls(
            arguments=found.argument_size_in_bytes,
            outputs=found.output_size_in_bytes,
            aliased=found.alias_size_in_bytes,
            temporary=found.temp_size_in_bytes,
        )

    @property
    def new(self) -> int:
        """Outputs in memory of their own."""
        return self.outputs - self.aliased


@dataclass(frozen=True)
class Phase:
    """What a device holds at the same time while one kind of program runs."""

    name: str
    parts: Mapping[str, int]
    """Name -> bytes."""

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """One device over a training step."""

    state: Mapping[str, int]
    """What lies there between steps, name -> bytes: exactly, from shapes and shardings."""
    phases: tuple[Phase, ...]
    """In the order in which they run."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.bytes)


def bytes_per_device(tree: Any) -> int:
    """What arrays or shapes with shardings take on the first of their devices: the part that lies there, in bytes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_bytes(program: Program) -> dict[str, int]:
    """The state of a run on each device between steps: name -> bytes, without what the run does not have."""
    state = abstract_state(program.model.shapes, program.tx, program.sharding, averaged=program.averages)
    parts = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "averaged weights": state.averaged,
        "frozen parameters": state.frozen,
    }
    found = {name: bytes_per_device(tree) for name, tree in parts.items()}
    return {name: size for name, size in found.items() if size}


class StepMemory:
    """The memory of a configuration's step for any rows of a microbatch.

    The programs that do not depend on the rows are compiled once, on a mesh of all `devices`. Those that do are
    compiled for one batch shard with `determinism: elastic`, where the program is the same on every mesh, else for all.

    Args:
        config: of the run, with a whole model section.
        vocab_size: rows of the token embedding.
        devices: JAX devices, emulated ones for instance.
        platform: on which the step is to run: there may be several microbatches under way on a device of a CPU.

    Raises:
        UserError: when the devices or the sharding rules do not fit.
    """

    def __init__(self, config: RunConfig, vocab_size: int, devices: Sequence[Any], platform: str):
        self.config, self._vocab_size, self._devices = config, vocab_size, devices
        self.program = build_program(config, vocab_size, devices)
        mesh = self.program.sharding.mesh
        self._at_once = programs_at_once(platform, batch_shards(mesh), mesh.size // batch_shards(mesh))
        self.state = state_bytes(self.program)
        self._batch: Batch = random_batch(1, config.model.seq_len, vocab_size)
        compiled = self.program.step.state_programs()
        self._state_programs = {name: ProgramBytes.of(program) for name, program in compiled.items()}
        self._elastic = config.trainer.determinism == "elastic"

    def compile(self, rows: int | None = None) -> dict[str, ProgramBytes]:
        """The programs whose memory grows with the rows, by name.

        Args:
            rows: of a microbatch; None: as the configuration says.
        """
        trainer: dict[str, Any] = {} if rows is None else {"per_device_parallelism": rows}
        devices = self._devices
        if self._elastic:
            mesh = self.program.sharding.mesh
            devices = devices[: mesh.devices.size // batch_shards(mesh)]
            trainer |= {"replica_ici_axis_size": 1, "replica_dcn_axis_size": 1}
        config = self.config.model_copy(update={"trainer": self.config.trainer.model_copy(update=trainer)})
        step = build_program(config, self._vocab_size, devices).step
        largest = max(range(len(step.plans.values)), key=lambda i: _weight(step.plans.values[i]))
        compiled = step.batch_programs(self._batch, step.plans.starts[largest])
        return {name: ProgramBytes.of(program) for name, program in compiled.items()}

    def largest_step(self, rows: int | None = None) -> MicrobatchPlan:
        """The batch that takes most memory, of those that the run has over its steps; `rows` as for `compile`."""
        trainer = self.config.trainer
        if rows is not None:
            trainer = trainer.model_copy(update={"per_device_parallelism": rows})
        return max(trainer.resolve().microbatches.values, key=_weight)

    def plan(self, programs: Mapping[str, ProgramBytes], rows: int | None = None) -> MemoryPlan:
        """The memory of a step with these programs, which `compile(rows)` gave."""
        plan = self.largest_step(rows)
        per_shard = plan.per_shard(self.program.sharding.mesh)
        batch = per_shard * plan.rows * sum(x.nbytes for x in self._batch)
        held = {"state": sum(self.state.values()), "batch": batch}
        if self._elastic:
            return MemoryPlan(self.state, tuple(self._elastic_phases(held, programs, per_shard)))
        return MemoryPlan(self.state, tuple(self._fast_phases(held, programs)))

    def _elastic_phases(
        self, held: Mapping[str, int], programs: Mapping[str, ProgramBytes], per_shard: int
    ) -> Sequence[Phase]:
        """Follows `ElasticStep.__call__`: what each program finds, and what it adds.

        `per_shard` is how many microbatches a device computes.
        """
        running = min(self._at_once, per_shard)
        trees = most_held(per_shard) + running - 1
        fixed, phases, gathered = self._state_programs, [], "gathered parameters"
        if (gather := fixed.get("gather")) is not None:
            held = {**held, gathered: gather.outputs}
            phases.append(Phase("gather", {**held, "temporary": gather.temporary}))
        reduction = fixed["reduction"]
        for name, program in programs.items():
            phase, sums = _SUMMED[name]
            phases.append(
                Phase(phase, {**held, sums: trees * program.outputs, "temporary": running * program.temporary})
            )
            both = reduction.arguments + reduction.new
            phases.append(Phase("reduction", {**held, sums: both, "temporary": reduction.temporary}))
            held = {**held, sums: reduction.outputs}
        held = {name: size for name, size in held.items() if name != gathered}
        phases.append(Phase("norm", {**held, "temporary": fixed["norm"].temporary}))
        return [*phases, *self._update_phases(held)]

    def _update_phases(self, held: Mapping[str, int]) -> Sequence[Phase]:
        """Where the update is not cut, its arguments live twice until its results are cut again."""
        fixed, phases = self._state_programs, []
        whole, update, after = fixed.get("update_gather"), fixed["update"], 0
        if whole is not None:
            phases.append(Phase("update: gather", {**held, "whole": whole.outputs, "temporary": whole.temporary}))
        inside = {**held, "whole": whole.outputs} if whole is not None else held
        phases.append(Phase("update", {**inside, "new state": update.new, "temporary": update.temporary}))
        if (scatter := fixed.get("update_scatter")) is not None:
            added = {"new state": update.new + scatter.new, "temporary": scatter.temporary}
            phases.append(Phase("update: scatter", {**inside, **added}))
            after = scatter.outputs
        if (average := fixed.get("average")) is not None:
            phases.append(Phase("average", {**held, "new state": after + average.new, "temporary": average.temporary}))
        return phases

    def _fast_phases(self, held: Mapping[str, int], programs: Mapping[str, ProgramBytes]) -> Sequence[Phase]:
        """Follows `FastStep.__call__`; its programs hold whatever they gather and add up."""
        phases = []
        if (estimate := programs.get("curvature")) is not None:
            phases.append(Phase("curvature", {**held, "estimates": estimate.outputs, "temporary": estimate.temporary}))
            held = {**held, "estimates": estimate.outputs}
        step = programs["step"]
        phases.append(Phase("step", {**held, "new state": step.new, "temporary": step.temporary}))
        if (average := self._state_programs.get("average")) is not None:
            phases.append(Phase("average", {**held, "new state": average.new, "temporary": average.temporary}))
        return phases


_SUMMED = {"microbatch": ("microbatch", "gradients"), "curvature": ("curvature", "estimates")}
"""For each program that runs once for a microbatch: its phase, and what is summed."""


def _weight(plan: MicrobatchPlan) -> tuple[int, int]:
    """Orders the batches of a run by the memory they take: either their rows rise, or the number of microbatches."""
    return plan.rows, plan.count
