"""Compiled programs with their traces, and a hash by which two programs are compared."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from lm_trainer.parallel.compile_per_device import compile_on_each
from lm_trainer.parallel.target_platform import target_platform
from lm_trainer.step.dispatch.repeatable import compile_repeatable

_DIGITS = 16
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Executable:
    """A compiled program, and what it was made of."""

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled

    @classmethod
    def make(cls, jitted: Any, *args: Any, repeatable: bool = True) -> Executable:
        """Compiles for arguments like these, which may be shapes.

        Args:
            jitted: the function.
            args: like those that it will be called with.
            repeatable: has the compiler take no kernel that adds in an order of the moment.
        """
        traced = jitted.trace(*args)
        lowered = traced.lower()
        return cls(traced, compile_repeatable(lowered, target_platform()) if repeatable else lowered.compile())

    def fingerprint(self) -> str:
        """A hash of the optimised program, without what names source lines."""
        return program_hash(self.compiled)

    def jaxpr(self) -> str:
        """The traced program, as JAX prints it."""
        return str(self.traced.jaxpr)

    def hlo(self) -> str:
        """The optimised program, as XLA prints it."""
        return self.compiled.as_text() or ""

    def runs(self) -> list[tuple[Executable, int]]:
        """Itself, which runs once."""
        return [(self, 1)]

    def memory(self) -> Any:
        """XLA's memory analysis, None where the backend has none."""
        return self.compiled.memory_analysis()


@dataclass(frozen=True)
class Executables:
    """Programs that together compute what one `Executable` does elsewhere."""

    by_name: Mapping[str, Executable]
    times: Mapping[str, int]
    """Name -> how often it runs where the one program would run once."""

    def fingerprint(self) -> str:
        """A hash of all of them."""
        each = [f"{name} {executable.fingerprint()}" for name, executable in self.by_name.items()]
        return hashlib.sha256("\n".join(each).encode()).hexdigest()[:_DIGITS]

    def jaxpr(self) -> str:
        """The traced programs, as JAX prints them."""
        return "\n\n".join(f"# {name}\n{executable.jaxpr()}" for name, executable in self.by_name.items())

    def hlo(self) -> str:
        """The optimised programs, as XLA prints them."""
        return "\n\n".join(f"// {name}\n{executable.hlo()}" for name, executable in self.by_name.items())

    def runs(self) -> list[tuple[Executable, int]]:
        """Each program, and how often it runs."""
        return [(executable, self.times[name]) for name, executable in self.by_name.items()]

    def memory(self) -> Any:
        """XLA's memory analysis of the program that takes most while it runs, None where the backend has none."""
        found = [each for executable in self.by_name.values() if (each := executable.memory()) is not None]
        return max(found, key=lambda each: each.temp_size_in_bytes, default=None)


def compile_for_each(
    make: Callable[[int], Executable],
    device_sets: Sequence[Sequence[Any]],
    what: str,
    *,
    by_all_processes: bool = False,
) -> list[Executable]:
    """One program for each of several sets of devices; warns where they do not run the same.

    Args:
        make: compiles for the set of that index.
        device_sets: the devices of each, in the order of its mesh.
        what: they compute, for the warning.
        by_all_processes: as for `compile_on_each`.
    """
    traced: list[jax.stages.Traced] = []

    def one(index: int) -> jax.stages.Compiled:
        executable = make(index)
        traced.append(executable.traced)
        return executable.compiled

    programs = compile_on_each(one, device_sets, by_all_processes=by_all_processes)
    executables = [Executable(traced[0], program) for program in programs]
    if len({executable.fingerprint() for executable in executables}) > 1:
        logger.warning("the devices run different programs for %s: bits may depend on their number", what)
    return executables


def program_hash(compiled: jax.stages.Compiled) -> str:
    """SHA-256 (16 hex digits) over the instructions of a compiled program; equal programs compute equal bits."""
    text = compiled.as_text() or ""
    first = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    body = re.sub(r",? metadata=\{[^}]*\}", "", text[first.start() if first else 0 :])
    # On a CPU: into how many tasks an element-wise loop is cut, by the threads of the process that compiled it.
    body = re.sub(r'"outer_dimension_partitions":\[[^\]]*\],?', "", body)
    # On a TPU: sizes of scratch memory, which differ between chips of one slice for one program.
    body = re.sub(r'"used_scoped_memory_configs":\[[^\]]*\],?', "", body)
    return hashlib.sha256(body.encode()).hexdigest()[:_DIGITS]
