"""The memory of a configuration's step, for any rows of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.program import build_program
from lm_trainer.run.config.gather import with_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.groups import compute_shardings
from lm_trainer.step.dispatch.memory import (
    PhaseBytes,
    ProgramBytes,
    bytes_per_device,
    compile_programs,
    phase_bytes,
    state_bytes,
    taken_memory,
)
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.phases import Phase, StepProgram
from lm_trainer.step.state.train_state import abstract_state


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
        growing: in plans, the temporary memory of a program that grows with the rows over what XLA says of it here.

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
        growing: float = 1.0,
    ):
        self._texts, self._growing = texts, growing
        self._vocab_size, self._devices, self._platform = vocab_size, devices, platform
        config = self.config = with_gather(config, vocab_size)
        program = self.program = build_program(config, vocab_size, devices)
        state = abstract_state(program.model.shapes, program.tx, program.sharding, averaged=program.averages)
        self.state = state_bytes(state)
        self._batch: Batch = random_batch(1, config.model.seq_len, vocab_size, config.model.features_shape)
        self._fixed = compile_programs(self._phases(self.largest_step()), grows=False, texts=texts)
        self._elastic = config.trainer.bitwise

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
        largest = max(step.plans.values, key=taken_memory)
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
        return StepMemory(config, self._vocab_size, self._devices, self._platform, growing=self._growing)

    def largest_step(self, rows: int | None = None) -> MicrobatchPlan:
        """The batch of the run that takes most memory; `rows` as for `compile`."""
        trainer = self.config.trainer
        if rows is not None:
            trainer = trainer.model_copy(update={"per_device_parallelism": rows})
        return max(trainer.step_plan.microbatches.values, key=taken_memory)

    def plan(self, programs: Mapping[str, ProgramBytes], rows: int | None = None) -> MemoryPlan:
        """The memory of a step with these programs, which `compile(rows)` gave."""
        plan = self.largest_step(rows)
        # The rows of all microbatches of a device are sent to it before the first is computed.
        row = sum(x.nbytes for x in jax.tree.leaves(self._batch))
        batch = max(map(len, self.program.step.devices.numbers(plan))) * plan.rows * row
        held = {"state": sum(self.state.values()), "batch": batch}
        found, phases = {**self._fixed, **programs}, self._phases(plan)
        if self._platform != "cpu" and self._devices[0].platform == "cpu":
            ran = {phase.program.name: phase.program for phase in phases}
            found |= {name: self._on_accelerator(program, found[name]) for name, program in ran.items()}
        return MemoryPlan(self.state, phase_bytes(phases, found, held))

    def _on_accelerator(self, program: StepProgram, here: ProgramBytes) -> ProgramBytes:
        """A program's memory there, from that of the program that a CPU's compiler made."""
        temporary = round(self._share(program) * here.temporary) + self._copied(program)
        return replace(here, temporary=temporary)

    def _share(self, program: StepProgram) -> float:
        """The temporary memory of a program on an accelerator over that for a CPU."""
        if program.elementwise:
            return 0.0
        return self._growing if program.grows else 1.0

    def _copied(self, program: StepProgram) -> int:
        """Bytes of the layers that are cast as a whole before the loop over them, which computes in fewer bits.

        A TPU's compiler takes the cast out of the loop; others cast the layer that they have come to. Where parameters
        are gathered layer by layer they come cast.
        """
        trainer = self.config.trainer
        narrows = trainer.mp.compute_dtype.itemsize < trainer.mp.param_dtype.itemsize
        taken_out = self._platform == "tpu" and self.config.model.scan and narrows
        if not (taken_out and program.grows and trainer.bitwise and not self.program.gathers_layers):
            return 0
        shardings = compute_shardings(self.program.sharding) or self.program.sharding.storage
        cast = {
            name: jax.ShapeDtypeStruct(x.shape, trainer.mp.compute_dtype, sharding=shardings[name])
            for name, x in self.program.model.shapes.items()
            if self.program.model.axes[name][:1] == ("layers",)
        }
        return bytes_per_device(cast)
