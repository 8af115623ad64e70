"""Phases of a training step: the programs that run one after another and the arrays that lie in memory meanwhile.

Every step describes its own phases beside its `__call__`. Sizes are symbols in terms of programs, so that describing a
step compiles nothing; `lm_trainer.plan` compiles the programs and puts bytes in place of the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lm_trainer.step.dispatch.executable import Executable

Figure = Literal["arguments", "outputs", "new", "temporary"]
"""Figures of XLA's memory analysis of a program; `new` are the outputs that do not lie where arguments were."""


@dataclass(frozen=True)
class Size:
    """A number of bytes: the sum of (count, name of a program, figure of that program)."""

    terms: tuple[tuple[int, str, Figure], ...]

    def __add__(self, other: Size) -> Size:
        return Size(self.terms + other.terms)

    def __rmul__(self, count: int) -> Size:
        return Size(tuple((count * times, program, figure) for times, program, figure in self.terms))


@dataclass(frozen=True)
class StepProgram:
    """A program of a step that is compiled when asked for."""

    name: str
    """Programs of one step with the same name take the same memory."""
    compile: Callable[[], Executable]
    grows: bool = False
    """True if its memory grows with the rows that are computed at once."""
    elementwise: bool = False
    """True if every result is computed from the elements at its own place. Compilers of accelerators fuse that and hold
    nothing in between; XLA for a CPU holds copies of what it is given."""

    @property
    def arguments(self) -> Size:
        """All arguments."""
        return Size(((1, self.name, "arguments"),))

    @property
    def outputs(self) -> Size:
        """All outputs."""
        return Size(((1, self.name, "outputs"),))

    @property
    def new(self) -> Size:
        """The outputs in memory of their own."""
        return Size(((1, self.name, "new"),))

    @property
    def temporary(self) -> Size:
        """The memory that the program takes only while it runs."""
        return Size(((1, self.name, "temporary"),))


@dataclass(frozen=True)
class Phase:
    """One program of a step, and how it changes the arrays that a device holds.

    While it runs, a device holds what the phase before left, `adds`, and the temporary memory of `at_once` programs.
    After it, `frees` are gone and `leaves` are there. Arrays go by names; those of one name add up.
    """

    name: str
    program: StepProgram
    adds: Mapping[str, Size] = field(default_factory=dict)
    frees: tuple[str, ...] = ()
    leaves: Mapping[str, Size] = field(default_factory=dict)
    at_once: int = 1
    """Number of these programs that a device runs at the same time."""
    runs: int = 1
    """Times that a device runs the program in a step."""
