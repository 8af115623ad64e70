"""Compiled programs with their traces, and a hash with which programs can be compared."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.nn.attention_kernel import summing_in_fixed_order
from lm_trainer.parallel.compile_per_device import compile_on_each
from lm_trainer.parallel.target_platform import target_platform
from lm_trainer.profile.program_graph import output_hashes
from lm_trainer.step.dispatch.repeatable import compile_repeatable

_DIGITS = 16
logger = logging.getLogger(__name__)


class MemoryAnalysis(Protocol):
    """XLA's memory analysis of a program; all sizes are in bytes on each device."""

    @property
    def argument_size_in_bytes(self) -> int:
        """Size of the arguments."""
        ...

    @property
    def output_size_in_bytes(self) -> int:
        """Size of the outputs, including outputs that reuse the memory of donated arguments."""
        ...

    @property
    def alias_size_in_bytes(self) -> int:
        """Size of the outputs that reuse the memory of donated arguments."""
        ...

    @property
    def temp_size_in_bytes(self) -> int:
        """Size of memory that is held only while the program runs."""
        ...


@dataclass(frozen=True)
class Executable:
    """A compiled program and its trace."""

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled

    @classmethod
    def from_jitted(cls, jitted: jax.stages.Wrapped, *args: PyTree, repeatable: bool = True) -> Executable:
        """Compiles a function.

        Args:
            jitted: jitted function to compile.
            args: arguments, or their shapes.
            repeatable: exclude kernels whose summation order varies between runs because they use atomics.
        """
        with summing_in_fixed_order(repeatable):
            traced = jitted.trace(*args)
        lowered = traced.lower()
        return cls(traced, compile_repeatable(lowered, target_platform()) if repeatable else lowered.compile())

    def fingerprint(self) -> str:
        """Returns a hash of the optimised program without source locations."""
        return program_hash(self.compiled)

    def graph_hash(self) -> str:
        """Returns a hash of how the program computes its results.

        Unlike the hash of its text, it does not depend on the schedule, or on the order in which fields are printed,
        which varies on GPUs. Programs with equal hashes give equal bits.
        """
        return _hash_lines(output_hashes(self.hlo()))

    def jaxpr(self) -> str:
        """Returns the traced program as printed by JAX."""
        return str(self.traced.jaxpr)

    def hlo(self) -> str:
        """Returns the optimised program as printed by XLA."""
        return self.compiled.as_text() or ""

    def run_counts(self) -> list[tuple[Executable, int]]:
        """Returns each program and its number of runs: this program, once."""
        return [(self, 1)]

    def memory(self) -> MemoryAnalysis | None:
        """Returns XLA's memory analysis; None if the backend has none."""
        return self.compiled.memory_analysis()


@dataclass(frozen=True)
class Executables:
    """Several programs that together compute the same as one `Executable`."""

    by_name: Mapping[str, Executable]
    times: Mapping[str, int]
    """Name -> number of runs of the program per run of the equivalent single program."""

    def fingerprint(self) -> str:
        """Returns a hash of all programs."""
        return _hash_lines([f"{name} {executable.fingerprint()}" for name, executable in self.by_name.items()])

    def graph_hash(self) -> str:
        """Returns a hash of how all programs compute their results; see `Executable.graph_hash`."""
        return _hash_lines([f"{name} {executable.graph_hash()}" for name, executable in self.by_name.items()])

    def jaxpr(self) -> str:
        """Returns the traced programs as printed by JAX."""
        return "\n\n".join(f"# {name}\n{executable.jaxpr()}" for name, executable in self.by_name.items())

    def hlo(self) -> str:
        """Returns the optimised programs as printed by XLA."""
        return "\n\n".join(f"// {name}\n{executable.hlo()}" for name, executable in self.by_name.items())

    def run_counts(self) -> list[tuple[Executable, int]]:
        """Returns each program and its number of runs."""
        return [(executable, self.times[name]) for name, executable in self.by_name.items()]

    def memory(self) -> MemoryAnalysis | None:
        """Returns XLA's memory analysis of the program with the most temporary memory; None if the backend has none."""
        analyses = [memory for executable in self.by_name.values() if (memory := executable.memory()) is not None]
        return max(analyses, key=lambda memory: memory.temp_size_in_bytes, default=None)


def compile_for_each(
    make: Callable[[int], Executable],
    device_sets: Sequence[Sequence[Device]],
    name: str,
    *,
    by_all_processes: bool = False,
) -> list[Executable]:
    """Compiles one program for each of several device sets. Warns if the compiled programs differ.

    Args:
        make: compiles the program for the device set with the given index.
        device_sets: devices of each set, in mesh order.
        name: name of the computation, for the warning.
        by_all_processes: as for `compile_on_each`.
    """
    traced: list[jax.stages.Traced] = []

    def compile_set(index: int) -> jax.stages.Compiled:
        executable = make(index)
        traced.append(executable.traced)
        return executable.compiled

    programs = compile_on_each(compile_set, device_sets, by_all_processes=by_all_processes)
    executables = [Executable(traced[0], program) for program in programs]
    hashes = (Executable.fingerprint, Executable.graph_hash)
    if all(len({*map(compute_hash, executables)}) > 1 for compute_hash in hashes):
        logger.warning("the devices run different programs for %s: bits may depend on their number", name)
    return executables


def _hash_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def program_hash(compiled: jax.stages.Compiled) -> str:
    """Returns the SHA-256 (16 hex digits) of a program's instructions. Programs with equal hashes give equal bits."""
    text = compiled.as_text() or ""
    first = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    body = re.sub(r",? metadata=\{[^}]*\}", "", text[first.start() if first else 0 :])
    # On a CPU: number of tasks of an element-wise loop, which depends on the threads of the process that compiles.
    body = re.sub(r'"outer_dimension_partitions":\[[^\]]*\],?', "", body)
    # On a TPU: sizes of scratch memory, which differ between the chips of a slice for the same program.
    body = re.sub(r'"used_scoped_memory_configs":\[[^\]]*\],?', "", body)
    return hashlib.sha256(body.encode()).hexdigest()[:_DIGITS]
