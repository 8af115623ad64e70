"""Programs for devices that are only described, kept in the directory of compiled programs for later sessions.

JAX keeps none of them, because it could not load them. The tests do not load them either: they read what is kept here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import cache_key

from tests.compile_cache import read_program, write_program

_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_THIS_FILE = Path(__file__).read_bytes()
Compile = Callable[..., Any]


@dataclass(frozen=True)
class KeptExecutable:
    """The part of XLA's executable that JAX and these tests read, under the names that XLA gives it."""

    text: str
    memory: dict[str, int]
    costs: dict[str, float] | None
    parameter_shardings: Sequence[Any] | None
    output_shardings: Sequence[Any] | None
    output_memory_kinds: Sequence[Sequence[str]]

    @classmethod
    def of(cls, executable: Any) -> KeptExecutable:
        """Reads the executable that the compiler has returned."""
        memory = executable.get_compiled_memory_stats()
        return cls(
            "\n\n".join(module.to_string() for module in executable.hlo_modules()),
            {name: getattr(memory, name) for part in _MEMORY if hasattr(memory, name := f"{part}_size_in_bytes")},
            _count_costs(executable),
            executable.get_parameter_shardings(),
            executable.get_output_shardings(),
            executable.get_output_memory_kinds(),
        )

    def get_hlo_text(self) -> str:
        return self.text

    def get_compiled_memory_stats(self) -> SimpleNamespace:
        return SimpleNamespace(**self.memory)

    def cost_analysis(self) -> dict[str, float] | None:
        return self.costs

    def get_parameter_shardings(self) -> Sequence[Any] | None:
        return self.parameter_shardings

    def get_output_shardings(self) -> Sequence[Any] | None:
        return self.output_shardings

    def get_output_memory_kinds(self) -> Sequence[Sequence[str]]:
        return self.output_memory_kinds


def _count_costs(executable: Any) -> dict[str, float] | None:
    """Returns the compiler's count of costs; None if it has none, as for GPUs."""
    try:
        return executable.cost_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise
        return None


def keep_described(compile_program: Compile, directory: Path) -> Compile:
    """Returns JAX's function that compiles, which reads programs for described devices from `directory` if it can."""

    def read_or_compile(backend: Any, module: Any, devices: Any, options: Any, *args: Any) -> Any:
        if type(backend).__name__ != "CompileOnlyPyClient":
            return compile_program(backend, module, devices, options, *args)
        # JAX's key leaves out the names of operations, and the devices that a GPU's program is compiled for.
        more = f"{[device.id for device in devices]} {module.operation.get_asm(enable_debug_info=True)}".encode()
        key = cache_key.get(module, np.array(list(devices)), options, backend)
        path = directory / f"{key}-{hashlib.sha256(_THIS_FILE + more).hexdigest()[:16]}-described"
        if content := read_program(path):
            return pickle.loads(content)
        executable = compile_program(backend, module, devices, options, *args)
        write_program(path, pickle.dumps(KeptExecutable.of(executable)))
        return executable

    return read_or_compile
