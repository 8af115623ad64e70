"""The bytes that one device holds in each phase of a training step, from shapes and from XLA's memory analysis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.config import RunConfig
from lm_trainer.run.program import build_program
from lm_trainer.step.executable import Executable
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.phases import Phase, Size
from lm_trainer.step.state import TrainState, abstract_state


@dataclass(frozen=True)
class ProgramBytes:
    """The memory of a compiled program on each of its devices, in bytes."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that lie where donated arguments were."""
    temporary: int
    """Held only while it runs."""

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
class PhaseBytes:
    """The memory that a device holds during one phase of a step."""

    name: str
    parts: Mapping[str, int]
    """Name -> bytes."""

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device over a training step."""

    state: Mapping[str, int]
    """The state between steps, name -> bytes: exact, from shapes and shardings."""
    phases: tuple[PhaseBytes, ...]
    """In the order in which they run."""

    @property
    def peak(self) -> PhaseBytes:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.bytes)


def bytes_per_device(tree: Any) -> int:
    """Bytes of arrays, or of shapes with shardings, on one of their devices; every device holds as many."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_bytes(state: TrainState) -> dict[str, int]:
    """The state of a run on each device between steps: name -> bytes, without what the run does not have.

    Args:
        state: arrays, or shapes with shardings, as `abstract_state` gives them.
    """
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
    compiled for one batch shard, where their program is the same on every mesh; with `determinism: fast` for all.

    Args:
        config: of the run, with a whole model section.
        vocab_size: rows of the token embedding.
        devices: JAX devices, emulated ones for instance.
        platform: on which the step is to run: there may be several microbatches under way on a device of a CPU.
        texts: gets the text of every program that is compiled, by name.

    Raises:
        UserError: when the devices or the sharding rules do not fit.
    """

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        devices: Sequence[Any],
        platform: str,
        texts: dict[str, str] | None = None,
    ):
        self._texts = texts
        self.config, self._vocab_size, self._devices, self._platform = config, vocab_size, devices, platform
        program = self.program = build_program(config, vocab_size, devices)
        state = abstract_state(program.model.shapes, program.tx, program.sharding, averaged=program.averages)
        self.state = state_bytes(state)
        self._batch: Batch = random_batch(1, config.model.seq_len, vocab_size, config.model.features_shape)
        self._fixed = compile_programs(self._phases(self.largest_step()), grows=False, texts=texts)
        self._elastic = config.trainer.determinism != "fast"

    def _phases(self, plan: MicrobatchPlan) -> list[Phase]:
        return [*self.program.step.phases(self._batch, plan, self._platform)]

    def compile(self, rows: int | None = None) -> dict[str, ProgramBytes]:
        """The programs whose memory grows with the rows, by name.

        Args:
            rows: of a microbatch; None: as the configuration says.
        """
        trainer: dict[str, Any] = {} if rows is None else {"per_device_parallelism": rows}
        devices = self._devices
        if self._elastic:
            # One shard of the batch: its devices compile the same program on every mesh, so the smallest one will do.
            mesh = self.program.sharding.mesh
            devices = devices[: mesh.devices.size // batch_shards(mesh)]
            trainer |= {"replica_ici_axis_size": 1, "replica_dcn_axis_size": 1}
        config = self.config.model_copy(update={"trainer": self.config.trainer.model_copy(update=trainer)})
        step = build_program(config, self._vocab_size, devices).step
        largest = max(step.plans.values, key=_weight)
        return compile_programs(step.phases(self._batch, largest, self._platform), grows=True, texts=self._texts)

    def runs(self) -> dict[str, int]:
        """The runs of each program on a device in the largest step."""
        runs = dict[str, int]()
        for phase in self._phases(self.largest_step()):
            runs[phase.program.name] = runs.get(phase.program.name, 0) + phase.runs
        return runs

    def in_turns(self, together: int) -> StepMemory:
        """The memory of the same step with this `trainer.microbatches_per_gather`."""
        trainer = self.config.trainer.model_copy(update={"microbatches_per_gather": together})
        config = self.config.model_copy(update={"trainer": trainer})
        return StepMemory(config, self._vocab_size, self._devices, self._platform)

    def largest_step(self, rows: int | None = None) -> MicrobatchPlan:
        """The batch of the run that takes most memory; `rows` as for `compile`."""
        trainer = self.config.trainer
        if rows is not None:
            trainer = trainer.model_copy(update={"per_device_parallelism": rows})
        return max(trainer.resolve().microbatches.values, key=_weight)

    def plan(self, programs: Mapping[str, ProgramBytes], rows: int | None = None) -> MemoryPlan:
        """The memory of a step with these programs, which `compile(rows)` gave."""
        plan = self.largest_step(rows)
        # The rows of all microbatches of a device are sent to it before the first is computed.
        row = sum(x.nbytes for x in jax.tree.leaves(self._batch))
        batch = max(map(len, self.program.step.devices.numbers(plan))) * plan.rows * row
        held = {"state": sum(self.state.values()), "batch": batch}
        found, phases = {**self._fixed, **programs}, self._phases(plan)
        if self._platform != "cpu" and self._devices[0].platform == "cpu":
            fused = {phase.program.name for phase in phases if phase.program.elementwise}
            found |= {name: replace(found[name], temporary=0) for name in fused}
        return MemoryPlan(self.state, phase_bytes(phases, found, held))


def compile_programs(
    phases: Iterable[Phase], *, grows: bool, texts: dict[str, str] | None = None
) -> dict[str, ProgramBytes]:
    """The programs of a step, by name, whose memory grows with the rows, or the others.

    Args:
        phases: of a step.
        grows: chooses among the programs.
        texts: gets their texts.

    Raises:
        UserError: as `ProgramBytes.of`.
    """
    programs = {phase.program.name: phase.program for phase in phases if phase.program.grows == grows}
    found = {}
    for name, program in programs.items():
        executable = program.compile()
        found[name] = ProgramBytes.of(executable)
        if texts is not None:
            texts[name] = executable.hlo()
    return found


def phase_bytes(
    phases: Iterable[Phase], programs: Mapping[str, ProgramBytes], held: Mapping[str, int]
) -> tuple[PhaseBytes, ...]:
    """Puts bytes in place of the sizes that a step gives for its phases.

    Args:
        phases: of a step, in the order in which they run.
        programs: all of them, by name.
        held: name -> bytes of arrays that are held from the first phase on.
    """
    found, held = [], dict(held)
    for phase in phases:
        # A phase finds the arrays that the one before left.
        inside = _with(held, phase.adds, programs)
        temporary = _bytes(phase.at_once * phase.program.temporary, programs)
        found.append(PhaseBytes(phase.name, {**inside, "temporary": temporary}))
        held = _with({name: size for name, size in held.items() if name not in phase.frees}, phase.leaves, programs)
    return tuple(found)


def _with(held: Mapping[str, int], more: Mapping[str, Size], programs: Mapping[str, ProgramBytes]) -> dict[str, int]:
    return {**held, **{name: held.get(name, 0) + _bytes(size, programs) for name, size in more.items()}}


def _bytes(size: Size, programs: Mapping[str, ProgramBytes]) -> int:
    return sum(count * getattr(programs[name], figure) for count, name, figure in size.terms)


def _weight(plan: MicrobatchPlan) -> tuple[int, int]:
    """Orders the batches of a run by the memory they take: either their rows rise, or the number of microbatches."""
    return plan.rows, plan.count
