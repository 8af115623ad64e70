"""Memory of a step of a configuration, as a function of the number of rows of a microbatch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from lm_trainer.core.batch import Batch
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.parallel.rehearsal import comparing_programs, on_one_shard
from lm_trainer.plan.attention_workspace import NO_WORKSPACE, AttentionWorkspace
from lm_trainer.profile.attention_kernels import computed_share, kernel_block
from lm_trainer.run.build.example_batch import example_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.device_groups import LAYERS_AT_ONCE
from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms
from lm_trainer.step.dispatch.memory import PhaseBytes, bytes_per_device, memory_sort_key, state_bytes
from lm_trainer.step.dispatch.mesh_group import dispatching_for
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.program import Program as StepProgram
from lm_trainer.step.dispatch.recorder import Key, Measure, MeasuredProgram
from lm_trainer.step.rehearse import StepRecord
from lm_trainer.step.state.train_state import abstract_state


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device during a training step."""

    state: Mapping[str, int]
    """State between steps, name -> bytes. Exact, because it is computed from shapes and shardings."""
    phases: tuple[PhaseBytes, ...]
    """One phase per program of a step, in the order in which the programs first run."""

    @property
    def peak(self) -> PhaseBytes:
        """Phase with the highest memory."""
        return max(self.phases, key=lambda phase: phase.bytes)


@dataclass(frozen=True)
class Correction:
    """Differences between the temporary memory on a target and the figures of the compiler in use."""

    growing: float = 1.0
    """Ratio of the target's temporary memory to the compiler's figure, for programs whose memory grows with the
    rows."""
    workspace: AttentionWorkspace = NO_WORKSPACE
    """Memory of attention that the compiler does not count."""


NO_CORRECTION = Correction()


class StepMemory:
    """Memory of a step of a configuration, for any number of rows of a microbatch.

    The step is rehearsed on one shard of the batch. Programs of a microbatch are compiled only for the devices of this
    shard, because they are the same on every mesh. Programs that move and add arrays are compiled for all `devices`.

    Args:
        config: configuration of the run, with a complete model section.
        vocab_size: number of rows of the token embedding.
        devices: JAX devices, which may be emulated.
        platform: target platform of the step. Matters because a CPU device may have several microbatches in flight.
        correction: differences between the memory on the target and the compiler's figures.
        programs: compiled programs of another plan of the same model, which are reused.

    Raises:
        UserError: if the devices or the sharding rules do not fit.
    """

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        devices: Sequence[Any],
        platform: str,
        correction: Correction = NO_CORRECTION,
        programs: MeasuredPrograms | None = None,
    ):
        self._correction = correction
        self._vocab_size, self._devices, self._platform = vocab_size, devices, platform
        self._layers_at_once = LAYERS_AT_ONCE
        config = self.config = with_resolved_gather(config, vocab_size)
        setup = self.setup = self._build(config.trainer)
        plan = self.largest_step()
        self.rows = plan.rows
        """Number of rows that a device computes at a time in the largest step."""
        if not config.trainer.bitwise and config.trainer.per_device_parallelism == -1:
            self.rows *= plan.microbatches_per_shard(setup.sharding.mesh)
        self._built = {self.rows: setup}
        state = abstract_state(setup.model.shapes, setup.tx, setup.sharding, averaged=setup.averages)
        self.state = state_bytes(state)
        self.programs = MeasuredPrograms() if programs is None else programs
        self._row: Batch = example_batch(config, 1, vocab_size)
        self._records = dict[int, StepRecord]()
        self._by_gather = dict[int, StepMemory]()

    def _build(self, trainer: TrainerConfig) -> TrainingSetup:
        """Returns a training setup that is only rehearsed and never runs."""
        with on_one_shard(), dispatching_for(self._platform):
            return build_setup(self.config.model_copy(update={"trainer": trainer}), self._vocab_size, self._devices)

    def _trainer_with_rows(self, rows: int | None) -> TrainerConfig:
        trainer = self.config.trainer
        return trainer if rows is None else trainer.model_copy(update={"per_device_parallelism": rows})

    def hlo_texts(self) -> dict[str, str]:
        """HLO texts of the step's programs, by the names in `run_counts`."""
        return {name: self.programs.texts[key] for name, key in self._keys_by_name().items()}

    def run_counts(self) -> dict[str, int]:
        """Number of runs of each program in the step, by name. Programs with equal names are numbered."""
        record = self.step_record()
        return {name: record.runs[key] for name, key in self._keys_by_name().items()}

    def _keys_by_name(self) -> dict[str, Key]:
        names = dict[str, Key]()
        for key in self.step_record().runs:
            count = sum(other[0] == key[0] for other in names.values())
            names[f"{key[0]} {count + 1}" if count else key[0]] = key
        return names

    def attention_product_flops(self, kind: str) -> list[float]:
        """FLOPs of one product of queries and keys in a microbatch on a device of `kind`, for each kind of layer.

        Only pairs in blocks that an attention kernel computes count.
        """
        spec, length = self.config.model.spec(self._vocab_size), self.config.model.seq_len
        axes = dict(self.setup.sharding.mesh.shape)
        rows = 1 if axes["pipeline"] > 1 else self.rows
        head_shards = self.config.trainer.step_plan.compute_shards("heads", axes)
        flops = []
        for attention in softmax_specs(spec.blocks[layers.start] for layers in spec.layers_by_slot):
            itemsize = 4 if attention.scores.upcast else self.config.trainer.mp.compute_dtype.itemsize
            block = kernel_block(attention, length, kind, itemsize)
            share = 1.0 if spec.encoder is not None else computed_share(attention, length, block)
            width = attention.num_heads * attention.head_dim // head_shards
            flops.append(2.0 * rows * length * length * width * share / axes["context"])
        return flops

    def with_gather(self, microbatches_per_gather: int) -> StepMemory:
        """Returns the memory of the same step with another value of `trainer.microbatches_per_gather`."""
        if microbatches_per_gather not in self._by_gather:
            trainer = self.config.trainer.model_copy(update={"microbatches_per_gather": microbatches_per_gather})
            config = self.config.model_copy(update={"trainer": trainer})
            self._by_gather[microbatches_per_gather] = StepMemory(
                config, self._vocab_size, self._devices, self._platform, self._correction, self.programs
            )
        return self._by_gather[microbatches_per_gather]

    def with_layers_at_once(self, layers_at_once: int) -> StepMemory:
        """Returns the memory of the same step with another number of layers in the queue of a device."""
        if layers_at_once == self._layers_at_once:
            # Its programs are rehearsed already.
            return self
        memory = copy.copy(self)
        memory._layers_at_once, memory._records, memory._by_gather = layers_at_once, {}, {}
        return memory

    def largest_step(self, rows: int | None = None) -> MicrobatchPlan:
        """Returns the division of the run's batch with the highest memory; `rows` as for `step_record`."""
        return max(self._trainer_with_rows(rows).step_plan.microbatches.values, key=memory_sort_key)

    def step_record(self, rows: int | None = None) -> StepRecord:
        """Returns the compiled programs of the step with the highest memory.

        Args:
            rows: number of rows of a microbatch; None: the configured number.
        """
        rows = self.rows if rows is None else rows
        if rows not in self._records:
            compares = comparing_programs() if self._by_own_compiler else nullcontext()
            with compares, self.programs.measure_for_rows(rows) as measure:
                self._records[rows] = self._rehearse(rows, measure)
        return self._records[rows]

    def plan(self, rows: int | None = None) -> MemoryPlan:
        """Returns the memory of a step with microbatches of `rows` rows, computed from its compiled programs."""
        return MemoryPlan(self.state, self.step_record(rows).phases)

    def estimate(self, rows: int) -> MemoryPlan:
        """Same as `plan`, but interpolates programs that are not compiled for this number of rows."""
        if rows in self._records:
            return self.plan(rows)
        return MemoryPlan(self.state, self._rehearse(rows, self.programs.interpolate(rows)).phases)

    def is_planned(self, rows: int) -> bool:
        """Returns true if the step with microbatches of `rows` rows has been planned."""
        return rows in self._records

    @property
    def _by_own_compiler(self) -> bool:
        """True if the programs are compiled by the compiler of an accelerator that is planned for."""
        return self._platform != "cpu" and self._devices[0].platform == self._platform

    def _rehearse(self, rows: int, measure: Measure) -> StepRecord:
        if rows not in self._built:
            self._built[rows] = self._build(self._trainer_with_rows(rows))
        setup = self._built[rows]
        setup.step.devices.layers_at_once = self._layers_at_once
        return setup.rehearse(self._row, self._platform, self._scale_to_accelerator(rows, measure))

    def _scale_to_accelerator(self, rows: int, measure: Measure) -> Measure:
        """Scales memory reported by the CPU compiler to an accelerator's, and adds the workspace of attention."""
        if self._platform == "cpu":
            return measure
        compiled_for_cpu = not self._by_own_compiler

        def measure_scaled(program: StepProgram, key: Key, args: tuple[Any, ...]) -> MeasuredProgram:
            measured = measure(program, key, args)
            temporary = measured.bytes.temporary
            if compiled_for_cpu:
                temporary = round(self._accelerator_ratio(program) * temporary) + self._layer_copy_bytes(program)
            temporary += self._correction.workspace.of_program(program.computation, rows)
            return replace(measured, bytes=replace(measured.bytes, temporary=temporary))

        return measure_scaled

    def _accelerator_ratio(self, program: StepProgram) -> float:
        """Returns the ratio of a program's temporary memory on an accelerator to its temporary memory on a CPU."""
        if program.elementwise:
            return 0.0
        return self._correction.growing if program.grows else 1.0

    def _layer_copy_bytes(self, program: StepProgram) -> int:
        """Returns the size in bytes of the low-precision copy of all layers that is made before a loop over them.

        The TPU compiler hoists the cast out of the loop, whereas other compilers cast one layer at a time. If gathered
        layer by layer, parameters are already in low precision.
        """
        trainer = self.config.trainer
        narrows = trainer.mp.compute_dtype.itemsize < trainer.mp.param_dtype.itemsize
        taken_out = self._platform == "tpu" and self.config.model.scan and narrows
        if not (taken_out and program.grows and trainer.bitwise and not self.setup.gathers_layers):
            return 0
        sharding = self.setup.sharding
        shardings = {name: NamedSharding(sharding.mesh, param.compute) for name, param in sharding.params.items()}
        cast = {
            name: jax.ShapeDtypeStruct(x.shape, trainer.mp.compute_dtype, sharding=shardings[name])
            for name, x in self.setup.model.shapes.items()
            if self.setup.model.axes[name][:1] == ("layers",)
        }
        return bytes_per_device(cast)
