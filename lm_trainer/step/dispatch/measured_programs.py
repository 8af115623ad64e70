"""Compiled programs of plans, and estimates for programs that are not compiled."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.rehearsal import Description
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.memory import ProgramBytes
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.dispatch.recorder import Key, Measure, MeasuredProgram, measure_compiled, measure_traced


class MeasuredPrograms:
    """Programs that are compiled only once for any number of plans.

    Args:
        compiled: programs of a microbatch that are already compiled, by name.
    """

    def __init__(self, compiled: Mapping[str, Executable] = MappingProxyType({})) -> None:
        self._compiled = compiled
        self._by_key = dict[Key, MeasuredProgram]()
        self._by_rows = dict[int, dict[str, MeasuredProgram]]()
        self._others = dict[Hashable, MeasuredProgram]()
        self._temporary = dict[str, int]()
        self.texts = dict[Key, str]()
        """HLO texts of the compiled programs."""

    @contextmanager
    def measure_for_rows(self, rows: int) -> Iterator[Measure]:
        """Returns a context in which unknown programs are compiled, for a step with microbatches of `rows` rows."""
        growing = dict[str, MeasuredProgram]()

        def measure(program: Program, key: Key, args: tuple[PyTree, ...]) -> MeasuredProgram:
            if key not in self._by_key:
                if program.grows:
                    program = replace(program, executable=self._compiled.get(program.name, program.executable))
                self._by_key[key], executable = measure_compiled(program, args)
                self.texts[key] = executable.hlo()
            measured = self._by_key[key]
            if program.grows:
                growing[program.name] = measured
            else:
                self._others[key[:2]] = measured
                self._temporary[program.name] = measured.bytes.temporary
            return measured

        yield measure
        self._by_rows[rows] = growing

    def interpolate(self, rows: int) -> Measure:
        """Interpolates programs for microbatches of `rows` rows between the two nearest sizes, or uses the only size.

        Sizes of axes are linear in the number of rows, and memory is nearly linear. Programs that only add the results
        of microbatches are taken from any size. Unknown programs are traced, and so are programs that were compiled
        for one size only, whose temporary memory is scaled to the number of rows.
        """
        sizes = sorted(self._by_rows, key=lambda size: abs(math.log(size / rows)))
        a, b = sizes[0], sizes[min(1, len(sizes) - 1)]
        near, far, share = self._by_rows[a], self._by_rows[b], (rows - a) / (b - a) if b != a else 0.0

        def measure(program: Program, key: Key, args: tuple[PyTree, ...]) -> MeasuredProgram:
            if program.grows and program.name in near and program.name in far:
                return _interpolate(near[program.name], far[program.name], share)
            if program.grows and (single := near.get(program.name) or far.get(program.name)) is not None:
                # Another number of microbatches for each gathering may need other programs.
                temporary = round(single.bytes.temporary * rows / (a if program.name in near else b))
                traced = measure_traced(program, key, args)
                return replace(traced, bytes=replace(traced.bytes, temporary=temporary))
            if (measured := self._by_key.get(key) or self._others.get(key[:2])) is not None:
                return measured
            traced, temporary = measure_traced(program, key, args), self._temporary.get(program.name, 0)
            return replace(traced, bytes=replace(traced.bytes, temporary=temporary))

        return measure


def _interpolate(near: MeasuredProgram, far: MeasuredProgram, share: float) -> MeasuredProgram:
    def linear(a: int, b: int) -> int:
        return max(0, round(a + share * (b - a)))

    figures: Mapping[str, int] = vars(near.bytes)
    size = ProgramBytes(**{name: linear(value, getattr(far.bytes, name)) for name, value in figures.items()})
    results = [
        Description(tuple(map(linear, a.shape, b.shape)), a.dtype, a.sharding)
        for a, b in zip(near.results, far.results, strict=True)
    ]
    return replace(near, bytes=size, results=results)
