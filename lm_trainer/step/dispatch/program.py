"""Programs that a step calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.parallel.rehearsal import compares_programs, current_rehearsal
from lm_trainer.step.dispatch.executable import Executable, compile_for_each


@dataclass(frozen=True, eq=False)
class Program:
    """A jitted function that a step calls. Runs on arrays; calls on abstract arrays of a rehearsal are recorded."""

    name: str
    """Name of the program in plans. Programs with equal names and argument shapes are the same program."""
    jitted: Any
    """The `jax.stages.Wrapped` function; None in a description of a program without its function."""
    results: str | tuple[str, ...]
    """Purpose of the arrays that the program returns, such as `gradients`. If it returns a tuple, one for each
    element."""
    grows: bool = False
    """True if the memory of the program grows with the number of rows that are computed at once."""
    elementwise: bool = False
    """True if every result is computed from the elements at the same position. Compilers for accelerators fuse such
    programs, which then need no temporary memory; XLA for CPUs copies the arguments."""
    overlaps: bool = False
    """True if a device may run several calls of the program at once."""
    queued: bool = False
    """True if the host may call the program long before it runs. Its results then take memory until the host has
    waited."""
    repeatable: bool = True
    """Same as for `Executable.from_jitted`."""
    exchanges: str = ""
    """The end of `name` that states what the program exchanges during a computation, if there are programs without it
    too."""
    executable: Executable | None = None
    """The compiled program; None: the program is compiled when it is called."""

    @property
    def computation(self) -> str:
        """The name without the exchanges."""
        return self.name.removesuffix(self.exchanges)

    def __call__(self, *args: PyTree) -> PyTree:
        """Enqueues the program and returns its results at once."""
        rehearsal = current_rehearsal()
        if rehearsal is not None:
            return rehearsal.run(self, args)
        return (self.jitted if self.executable is None else self.executable.compiled)(*args)

    def compile(self, *args: PyTree) -> Executable:
        """Compiles the program for these arguments, which may be shapes. Returns `executable` if it is set."""
        return self.executable or Executable.from_jitted(self.jitted, *args, repeatable=self.repeatable)


def create_programs(
    program: Program,
    jit_for: Callable[[int], jax.stages.Wrapped],
    arguments: Callable[[int], tuple[PyTree, ...]],
    device_sets: Sequence[Sequence[Device]],
    name: str,
    *,
    by_all_processes: bool = False,
) -> list[Program]:
    """Creates a program for each of several device sets, and compiles them, except in a rehearsal without compilation.

    Args:
        program: description of the program.
        jit_for: returns the function for the device set with the given index.
        arguments: returns the shapes of the arguments for the device set with the given index.
        device_sets: as for `compile_for_each`.
        name: name of the computation, for a warning.
        by_all_processes: as for `compile_on_each`.
    """
    programs = [replace(program, jitted=jit_for(index)) for index in range(len(device_sets))]
    if not compares_programs():
        return programs

    def compile_set(index: int) -> Executable:
        return Executable.from_jitted(programs[index].jitted, *arguments(index))

    executables = compile_for_each(compile_set, device_sets, name, by_all_processes=by_all_processes)
    return [replace(program, executable=executable) for program, executable in zip(programs, executables, strict=True)]
