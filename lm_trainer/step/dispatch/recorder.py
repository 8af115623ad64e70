"""Programs of a step in the order of their calls, and the memory that a device holds during each of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.parallel.rehearsal import AbstractArray, Description, Memory, create_abstract_array
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.memory import PhaseBytes, ProgramBytes, bytes_per_device
from lm_trainer.step.dispatch.program import Program

Key = tuple[str, *tuple[Hashable, ...]]
"""Name of a program, with the structure and shapes of its arguments."""


@dataclass(frozen=True)
class MeasuredProgram:
    """Measurements of a program for arguments of certain shapes."""

    bytes: ProgramBytes
    structure: Hashable
    """Tree structure of the results."""
    results: Sequence[Description]
    consumed: Sequence[int]
    """Positions of donated arrays among the leaves of all arguments."""


class Measure(Protocol):
    """Function that measures the results and memory of programs."""

    def __call__(self, program: Program, key: Key, args: tuple[PyTree, ...]) -> MeasuredProgram:
        """Measures a program with arguments of these shapes."""
        ...


@dataclass
class _Call:
    """Calls of a program with arguments of certain shapes."""

    measured: MeasuredProgram
    sizes: list[int]
    """Size of each result on the device, in bytes."""
    purposes: list[str]
    """Purpose of each result."""
    runs: int = 0


class MemoryLimitExceeded(Exception):
    """Ends a rehearsal in which the device exceeds its memory."""


class Recorder:
    """A rehearsal that records the programs that are called, and the memory of the device while they run.

    Args:
        measure: measures the results and memory of a program. Called once for each program and argument shapes.
        devices: devices of this process that take part; the memory of the first one is recorded.
        at_once: number of overlapping programs that a device runs at the same time.
        limit: memory of the device in bytes; if it is exceeded, `MemoryLimitExceeded` is raised.
    """

    def __init__(self, measure: Measure, devices: Sequence[Device], at_once: int = 1, limit: int | None = None):
        self.memory, self.devices, self._limit = Memory(devices[0]), devices, limit
        self._measure, self._at_once = measure, at_once
        self._calls: dict[Key, _Call] = {}
        self._peaks: dict[str, PhaseBytes] = {}

    @property
    def phases(self) -> tuple[PhaseBytes, ...]:
        """Peak memory of the device while each program runs, in the order in which the programs first run."""
        return tuple(self._peaks.values())

    @property
    def runs(self) -> dict[Key, int]:
        """Number of runs of each program on the device."""
        return {key: call.runs for key, call in self._calls.items()}

    def create_abstract_arrays(self, tree: PyTree, purpose: str) -> PyTree:
        """Creates abstract arrays from shapes with shardings; they count towards the memory from now on."""
        return jax.tree.map(
            lambda x: create_abstract_array(Description(x.shape, x.dtype, x.sharding), self.memory, purpose), tree
        )

    def run(self, program: Program, args: tuple[PyTree, ...]) -> PyTree:
        """Records a run of a program and returns its results."""
        leaves, structure = jax.tree.flatten(args)
        key = (program.name, structure, tuple(x.description if isinstance(x, AbstractArray) else x for x in leaves))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._measure_call(program, key, args)
        memory, measured = self.memory, call.measured
        memory.calls += 1
        call.runs += 1
        self._record_peak(program, measured.bytes)
        # Static arguments are not arguments of the compiled program.
        arguments = [x for x in leaves if isinstance(x, AbstractArray | np.generic)]
        buffers = [x.buffer if isinstance(x, AbstractArray) else None for x in arguments]
        for position in measured.consumed:
            if (buffer := buffers[position]) is not None:
                buffer.free()
        for buffer in buffers:
            if buffer is not None:
                buffer.last_call = memory.calls
        results = [
            create_abstract_array(description, memory, purpose, queued=program.queued, size=size)
            for description, size, purpose in zip(measured.results, call.sizes, call.purposes, strict=True)
        ]
        return jax.tree.unflatten(measured.structure, results)

    def _measure_call(self, program: Program, key: Key, args: tuple[PyTree, ...]) -> _Call:
        shapes = jax.tree.map(lambda x: x.description.struct if isinstance(x, AbstractArray) else x, args)
        measured = self._measure(program, key, shapes)
        sizes = [description.bytes_on(self.memory.device) for description in measured.results]
        return _Call(measured, sizes, _result_purposes(program, measured.structure))

    def _record_peak(self, program: Program, sizes: ProgramBytes) -> None:
        """Records the memory of the device while a program runs, before its results replace donated arguments."""
        at_once = self._at_once if program.overlaps else 1
        total = self.memory.total + at_once * (sizes.new_outputs + sizes.temporary)
        peak = self._peaks.get(program.name)
        if peak is not None and peak.bytes >= total:
            return
        parts = {purpose: size for purpose, size in self.memory.held.items() if size}
        # If results have several purposes, the results of the computation come first and are the largest.
        purpose = program.results if isinstance(program.results, str) else program.results[0]
        parts[purpose] = parts.get(purpose, 0) + at_once * sizes.new_outputs
        self._peaks[program.name] = PhaseBytes(program.name, {**parts, "temporary": at_once * sizes.temporary})
        if self._limit is not None and total > self._limit:
            raise MemoryLimitExceeded


def _result_purposes(program: Program, structure: PyTree) -> list[str]:
    """Returns the purpose of each array that a program returns."""
    if isinstance(program.results, str):
        return [program.results] * structure.num_leaves
    pairs = zip(program.results, structure.children(), strict=True)
    return [purpose for purpose, child in pairs for _ in range(child.num_leaves)]


def measure_compiled(program: Program, args: tuple[PyTree, ...]) -> tuple[MeasuredProgram, Executable]:
    """Compiles a program and reads XLA's memory analysis. Also returns the `Executable`.

    Raises:
        UserError: as `ProgramBytes.from_executable`.
    """
    executable = program.compile(*args)
    shapes, structure = jax.tree.flatten(executable.traced.out_info)
    shardings = jax.tree.leaves(executable.compiled.output_shardings)
    results = [Description(x.shape, x.dtype, sharding) for x, sharding in zip(shapes, shardings, strict=True)]
    consumed = [i for i, info in enumerate(jax.tree.leaves(executable.traced.args_info)) if info.donated]
    return MeasuredProgram(ProgramBytes.from_executable(executable), structure, results, consumed), executable


def measure_traced(program: Program, key: Key, args: tuple[PyTree, ...]) -> MeasuredProgram:
    """Measures a program by tracing it; results without a sharding get the sharding of an argument of equal shape."""
    del key
    traced = program.jitted.trace(*args)
    shapes, structure = jax.tree.flatten(traced.out_info)
    arguments = [x for x in jax.tree.leaves(args) if isinstance(x, jax.ShapeDtypeStruct)]
    alike = {x.shape: x.sharding for x in arguments}
    shardings: list[Sharding] = [
        x.sharding or alike.get(x.shape) or _replicate_over_mesh(arguments[0].sharding) for x in shapes
    ]
    results = [Description(x.shape, x.dtype, sharding) for x, sharding in zip(shapes, shardings, strict=True)]
    consumed = [i for i, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
    outputs = bytes_per_device([description.struct for description in results])
    donated = bytes_per_device([arguments[i] for i in consumed])
    figures = ProgramBytes(bytes_per_device(arguments), outputs, min(donated, outputs), 0)
    return MeasuredProgram(figures, structure, results, consumed)


def _replicate_over_mesh(sharding: PyTree) -> Sharding:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
