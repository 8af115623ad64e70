"""The programs that a step calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_trainer.parallel.rehearsal import current_rehearsal
from lm_trainer.step.dispatch.executable import Executable, compile_for_each


@dataclass(frozen=True, eq=False)
class Program:
    """A jitted function that a step calls: on arrays it runs, on abstract ones of a rehearsal it is noted down."""

    name: str
    """In plans. Programs of one name, called with arguments of the same shapes, are the same."""
    jitted: Any
    results: str
    """Purpose of the arrays that it returns, such as `gradients`."""
    grows: bool = False
    """True if its memory grows with the rows that are computed at once."""
    elementwise: bool = False
    """True if every result is computed from the elements at its own place. Compilers of accelerators fuse that and hold
    nothing in between; XLA for a CPU holds copies of what it is given."""
    overlaps: bool = False
    """True if a device may run several of them at once."""
    queued: bool = False
    """True if the host may call it long before it runs, so that its results take memory until the host has waited."""
    repeatable: bool = True
    """As for `Executable.make`."""
    executable: Executable | None = None
    """The program as it is compiled; without, JAX compiles it when it is called."""

    def __call__(self, *args: Any) -> Any:
        """Enqueues the program and returns its results at once."""
        rehearsal = current_rehearsal()
        if rehearsal is not None:
            return rehearsal.run(self, args)
        return (self.jitted if self.executable is None else self.executable.compiled)(*args)

    def compile(self, *args: Any) -> Executable:
        """The program for arguments like these, which may be shapes."""
        return self.executable or Executable.make(self.jitted, *args, repeatable=self.repeatable)


def on_each(
    program: Program,
    jitted_for: Callable[[int], Any],
    arguments: Callable[[int], tuple[Any, ...]],
    device_sets: Sequence[Sequence[Any]],
    what: str,
    *,
    by_all_processes: bool = False,
) -> list[Program]:
    """A program for each of several sets of devices, compiled but in a rehearsal.

    Args:
        program: what all of them are.
        jitted_for: its function for the set of that index.
        arguments: shapes of what it is called with there.
        device_sets: as for `compile_for_each`.
        what: they compute, for a warning.
        by_all_processes: as for `compile_on_each`.
    """
    if current_rehearsal() is not None:
        return [replace(program, jitted=jitted_for(index)) for index in range(len(device_sets))]

    def one(index: int) -> Executable:
        return Executable.make(jitted_for(index), *arguments(index))

    executables = compile_for_each(one, device_sets, what, by_all_processes=by_all_processes)
    return [replace(program, executable=executable) for executable in executables]
