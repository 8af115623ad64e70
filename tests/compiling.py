"""Compilation for tests, most of whose time XLA takes for programs that run for milliseconds."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from lm_trainer.core.nested_collectives import has_nested_collectives
from lm_trainer.core.runtime import resident_bytes, return_freed_memory
from tests.compile_cache import read_program, write_program


@functools.cache
def _unoptimised() -> dict[str, Any]:
    """Options of the compiler; XLA of jax 0.12 does without the second one."""
    import jax

    least = {"xla_backend_optimization_level": 0}
    options = {**least, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return least
    return options


class _Compiler:
    """JAX's choice of options for XLA, with ours laid under those of a caller while `quick`."""

    quick = False
    original_options: Callable[..., Any] | None = None

    @classmethod
    def options(cls, *args: Any, **options: Any) -> Any:
        assert cls.original_options is not None
        if cls.quick:
            options["env_options_overrides"] = {**_unoptimised(), **(options.get("env_options_overrides") or {})}
        return cls.original_options(*args, **options)


class _Serialized:
    """Programs that are compiled past JAX's own cache, kept there all the same.

    On a CPU, what was read from JAX's cache cannot be serialized again, so `compile_on_each` does without it. Here the
    serialized form is what is kept, and what is handed out when the program that was made of it is serialized. What
    one device has compiled is so read where there are several, and the other way round.
    """

    compile: Callable[..., Any] | None = None
    look_up: Callable[..., Any] | None = None
    identify: Callable[..., Any] | None = None
    directory: Path | None = None
    """JAX's cache, also while JAX does without it."""
    fixed = False
    """True if runs, each of which names a cache to JAX, leave `directory` as it is."""
    read: deque[tuple[Any, bytes]] = deque(maxlen=8)
    """The programs that were read last, each with its serialized form."""

    @classmethod
    def read_from_cache(cls, *args: Any) -> Any:
        import jax

        assert cls.look_up is not None
        if not cls.fixed and (directory := jax.config.values["jax_compilation_cache_dir"]) is not None:
            cls.directory = Path(directory)
        return cls.look_up(*args)

    @classmethod
    def compile_and_load(cls, backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        import jax
        import numpy as np
        from jax._src import cache_key, compilation_cache

        assert cls.compile is not None
        cached = jax.config.values["jax_compilation_cache_dir"] is not None
        if cached or host_callbacks or backend.platform != "cpu" or cls.directory is None:
            return cls.compile(backend, module, devices, options, host_callbacks)
        path = cls.directory / f"{cache_key.get(module, np.array(list(devices)), options, backend)}-cache"
        if entry := read_program(path):
            content, _ = compilation_cache.extract_executable_and_time(entry)
            program = backend.deserialize_executable(content, devices, options)
            cls.read.append((program, content))
            return program
        program = cls.compile(backend, module, devices, options, host_callbacks)
        if len(devices) == 1 or not has_nested_collectives(program.hlo_modules()[0].to_string()):
            write_program(path, compilation_cache.combine_executable_and_time(program.serialize(), 0))
        return program

    @classmethod
    def persistent_id(cls, pickler: Any, item: Any) -> Any:
        assert cls.identify is not None
        content = next((content for program, content in cls.read if program is item), None)
        return cls.identify(pickler, item) if content is None else ("exec", content)


class _Writer:
    """JAX's writer of its cache, which writes in the first process of a run alone.

    On CPUs no process can read what another has written: each compiles for devices of its own.
    """

    write: Callable[..., None] | None = None

    @classmethod
    def write_in_any_process(cls, *args: Any) -> None:
        from jax._src import distributed

        assert cls.write is not None
        with mock.patch.object(distributed.global_state, "process_id", 0):
            cls.write(*args)


def keep_all_programs(directory: Path | None = None) -> None:
    """Keeps in the directory of JAX's cache what is compiled without it, and in processes other than the first.

    Args:
        directory: the one for all runs of this process, which have one number of threads; None: that of the last run.
            What is found would otherwise depend on the tests before.
    """
    from jax._src import compiler
    from jax.experimental import serialize_executable

    from lm_trainer.core.jax_internals import compile_nested_collectives_again

    if directory is not None:
        _Serialized.directory, _Serialized.fixed = directory, True
    compile_nested_collectives_again()
    if _Serialized.compile is None:
        _Writer.write = compiler._cache_write
        compiler._cache_write = _Writer.write_in_any_process
        _Serialized.look_up = compiler._cache_read
        compiler._cache_read = _Serialized.read_from_cache
        _Serialized.compile = compiler.backend_compile_and_load
        compiler.backend_compile_and_load = _Serialized.compile_and_load
        pickler = serialize_executable._JaxPjrtPickler
        _Serialized.identify = pickler.persistent_id
        pickler.persistent_id = lambda self, obj: _Serialized.persistent_id(self, obj)


def compile_quickly(quick: bool) -> None:
    """Lets JAX compile without XLA's expensive optimisations (a third of the time, slower code), or with them again.

    Nothing that was compiled the other way is used any more: one comparison never has programs of both kinds.
    """
    import jax
    from jax._src import compiler  # JAX has no public default for the options of all programs

    if _Compiler.original_options is None:
        _unoptimised()  # which compiles by itself
        _Compiler.original_options = compiler.get_compile_options
        compiler.get_compile_options = _Compiler.options
        keep_all_programs(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))
    if _Compiler.quick != quick:
        _Compiler.quick = quick
        jax.clear_caches()


def flags_of_processes() -> list[str]:
    """The flags with which XLA compiles in other processes as it does in this one."""
    return [f"--{name}={str(value).lower()}" for name, value in _unoptimised().items()] if _Compiler.quick else []


def quick_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` without XLA's expensive optimisations, in a test that is marked `optimised` as well."""
    import jax

    return jax.jit(function, compiler_options=_unoptimised(), **options)


MAPS = Path("/proc/self/maps")
"""One line for each piece of memory of this process; only Linux has it."""
MOST_MAPS = 20_000
"""Linux gives a process 65,530, and one file of tests takes up to 30,000."""
MOST_GROWTH = 2e9
"""Bytes by which the memory of this process grows before it is freed. Three workers share a machine of 24 GB."""


def free_programs(most: int = MOST_MAPS) -> None:
    """Frees compiled programs if there are many, each of which takes several pieces of memory.

    Where Linux has no further piece for a program, XLA ends the process with a segmentation fault.
    """
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > most:
        _free_programs()


class _Memory:
    """Memory of this process after it was last freed."""

    resident = 0
    """Bytes; 0 before the first time."""


def free_memory(most: float = MOST_GROWTH) -> None:
    """Returns freed memory to the system, and frees compiled programs if that is too little.

    A run in this process lets glibc keep all that is freed, and tests of large models free gigabytes. Where the system
    has no memory left, it kills a worker in the middle of a test.

    Args:
        most: bytes by which memory may grow before.
    """
    if _growth() <= most:
        return
    return_freed_memory()
    if _growth() > most / 2:
        _free_programs()
        return_freed_memory()
        _Memory.resident += _growth()


def _growth() -> int:
    return (resident_bytes() or 0) - _Memory.resident


def _free_programs() -> None:
    if (jax := sys.modules.get("jax")) is not None:
        jax.clear_caches()
        gc.collect()  # runs keep their programs in reference cycles
