"""The programs of a step in the order in which it calls them, and the memory of a device meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.parallel.rehearsal import AbstractArray, Description, Memory, abstract
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.memory import PhaseBytes, ProgramBytes, bytes_per_device
from lm_trainer.step.dispatch.program import Program

Key = tuple[Any, ...]
"""Name of a program, and the shapes that it is called with."""


@dataclass(frozen=True)
class Measured:
    """A program for arguments of some shapes."""

    bytes: ProgramBytes
    structure: Any
    """Tree structure of its results."""
    results: Sequence[Description]
    consumed: Sequence[int]
    """Positions of the arguments that it consumes, among the arrays in all of them."""


class Measure(Protocol):
    """Finds out what a program returns and takes."""

    def __call__(self, program: Program, key: Key, args: tuple[Any, ...]) -> Measured:
        """Measures a program with arguments of these shapes."""
        ...


@dataclass
class _Call:
    """A program with arguments of some shapes."""

    measured: Measured
    sizes: list[int]
    """Bytes of its results on the device."""
    runs: int = 0


class Enough(Exception):
    """Ends a rehearsal in which the device holds more than it has."""


class Recorder:
    """A rehearsal that notes down which programs are called, and what the device holds while they run.

    Args:
        measure: tells what a program returns and takes; asked once for each program and shapes.
        devices: of this process that take part; the memory is that of the first.
        at_once: programs that a device may run at the same time, of those that overlap.
        limit: bytes of the device, above which `Enough` is raised.
    """

    def __init__(self, measure: Measure, devices: Sequence[Any], at_once: int = 1, limit: int | None = None):
        self.memory, self.devices, self._limit = Memory(devices[0]), devices, limit
        self._measure, self._at_once = measure, at_once
        self._calls: dict[Key, _Call] = {}
        self._peaks: dict[str, PhaseBytes] = {}

    @property
    def phases(self) -> tuple[PhaseBytes, ...]:
        """The memory of the device while each program runs, where that is most; in the order of their first runs."""
        return tuple(self._peaks.values())

    @property
    def runs(self) -> dict[Key, int]:
        """Runs of each program on the device."""
        return {key: call.runs for key, call in self._calls.items()}

    def hold(self, tree: Any, purpose: str) -> Any:
        """Abstract arrays like these shapes with shardings, which are held from now on."""
        return jax.tree.map(lambda x: abstract(Description(x.shape, x.dtype, x.sharding), self.memory, purpose), tree)

    def run(self, program: Program, args: tuple[Any, ...]) -> Any:
        """Notes a run of a program down, and returns its results."""
        leaves, structure = jax.tree.flatten(args)
        key = (program.name, structure, tuple(x.about if isinstance(x, AbstractArray) else x for x in leaves))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._measured(program, key, args)
        memory, measured = self.memory, call.measured
        memory.calls += 1
        call.runs += 1
        self._note(program, measured.bytes)
        # Without what a function is compiled for, which is no argument of its program.
        arguments = [x for x in leaves if isinstance(x, AbstractArray | np.generic)]
        buffers = [x.buffer if isinstance(x, AbstractArray) else None for x in arguments]
        for position in measured.consumed:
            if (buffer := buffers[position]) is not None:
                buffer.free()
        for buffer in buffers:
            if buffer is not None:
                buffer.last_call = memory.calls
        results = [
            abstract(about, memory, program.results, queued=program.queued, size=size)
            for about, size in zip(measured.results, call.sizes, strict=True)
        ]
        return jax.tree.unflatten(measured.structure, results)

    def _measured(self, program: Program, key: Key, args: tuple[Any, ...]) -> _Call:
        shapes = jax.tree.map(lambda x: x.about.struct if isinstance(x, AbstractArray) else x, args)
        measured = self._measure(program, key, shapes)
        return _Call(measured, [about.bytes_on(self.memory.device) for about in measured.results])

    def _note(self, program: Program, taken: ProgramBytes) -> None:
        """Notes what the device holds while a program runs, before its results take the place of what it consumes."""
        at_once = self._at_once if program.overlaps else 1
        total = self.memory.total + at_once * (taken.new + taken.temporary)
        peak = self._peaks.get(program.name)
        if peak is not None and peak.bytes >= total:
            return
        parts = {purpose: size for purpose, size in self.memory.held.items() if size}
        parts[program.results] = parts.get(program.results, 0) + at_once * taken.new
        self._peaks[program.name] = PhaseBytes(program.name, {**parts, "temporary": at_once * taken.temporary})
        if self._limit is not None and total > self._limit:
            raise Enough


def measure_compiled(program: Program, args: tuple[Any, ...]) -> tuple[Measured, Executable]:
    """Compiles a program and asks XLA for its memory; returns the `Executable` as well.

    Raises:
        UserError: as `ProgramBytes.of`.
    """
    executable = program.compile(*args)
    shapes, structure = jax.tree.flatten(executable.traced.out_info)
    shardings = jax.tree.leaves(executable.compiled.output_shardings)
    results = [Description(x.shape, x.dtype, lies) for x, lies in zip(shapes, shardings, strict=True)]
    consumed = [i for i, info in enumerate(jax.tree.leaves(executable.traced.args_info)) if info.donated]
    return Measured(ProgramBytes.of(executable), structure, results, consumed), executable


def measure_traced(program: Program, key: Key, args: tuple[Any, ...]) -> Measured:
    """Measures a program by its trace; a result without a sharding gets that of an argument of the same shape."""
    del key
    traced = program.jitted.trace(*args)
    shapes, structure = jax.tree.flatten(traced.out_info)
    arguments = [x for x in jax.tree.leaves(args) if isinstance(x, jax.ShapeDtypeStruct)]
    alike = {x.shape: x.sharding for x in arguments}
    lies: list[Any] = [x.sharding or alike.get(x.shape) or _everywhere(arguments[0].sharding) for x in shapes]
    results = [Description(x.shape, x.dtype, sharding) for x, sharding in zip(shapes, lies, strict=True)]
    consumed = [i for i, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
    outputs = bytes_per_device([about.struct for about in results])
    taken = bytes_per_device([arguments[i] for i in consumed])
    figures = ProgramBytes(bytes_per_device(arguments), outputs, min(taken, outputs), 0)
    return Measured(figures, structure, results, consumed)


def _everywhere(sharding: Any) -> Any:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
