"""Compiles a program for several sets of devices of this process, with a single compilation if possible.

On a CPU, machine code is compiled for one set of devices and loaded for each of the other sets, unless it may hang once
loaded (`lm_trainer.core.nested_collectives`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import jax
from jax.experimental.compilation_cache import compilation_cache

from lm_trainer.core.jax_internals import load_on_device_sets
from lm_trainer.core.jax_types import Device
from lm_trainer.core.nested_collectives import has_nested_collectives
from lm_trainer.parallel.kept_programs import send_new_programs
from lm_trainer.parallel.processes import is_lead, wait_for_all
from lm_trainer.parallel.target_platform import compilation_target, compiling_for

logger = logging.getLogger(__name__)


def compile_on_each(
    compile_on: Callable[[int], jax.stages.Compiled],
    device_sets: Sequence[Sequence[Device]],
    *,
    by_all_processes: bool = False,
) -> list[jax.stages.Compiled]:
    """Compiles the same program for each of several sets of devices.

    Args:
        compile_on: compiles the program for the device set with the given index.
        device_sets: devices of each set, in mesh order.
        by_all_processes: True if each process of the run calls this function at the same point, for its own device
            sets. The function may then wait for the other processes.
    """
    compiled_for = compilation_target()

    def compile_in_thread(index: int) -> jax.stages.Compiled:
        with compiling_for(compiled_for):
            return compile_on(index)

    remaining = range(1, len(device_sets))
    platform = device_sets[0][0].platform
    if remaining and platform == "cpu":
        with _without_cache():
            first = compile_on(0)
            if len(device_sets[0]) > 1 and has_nested_collectives(first.as_text() or ""):
                return [first, *map(compile_on, remaining)]
        return [first, *load_on_device_sets(first, device_sets[0], [device_sets[i] for i in remaining])]
    if platform == "tpu" and not all(map(_includes_first_chip, device_sets)):
        with _without_cache(), ThreadPoolExecutor() as pool:
            return [*pool.map(compile_in_thread, range(len(device_sets)))]
    # A GPU compiler chooses kernels by timing them, and may choose differently each time. The first program of the
    # first process is therefore compiled before all others. The others find it in the compilation cache, which is
    # shared by all GPUs of a kind and by all processes with access to its directory, and so run the same kernels.
    with _after_the_first_process(device_sets) if by_all_processes and platform == "gpu" else nullcontext():
        first = compile_on(0)
    with ThreadPoolExecutor() as pool:
        return [first, *pool.map(compile_in_thread, remaining)]


@contextmanager
def _after_the_first_process(device_sets: Sequence[Sequence[Device]]) -> Iterator[None]:
    """Lets process 0 go first in work that every process does. Only process 0 writes to JAX's compilation cache.

    If the run keeps its programs, process 0 sends the new ones to the others, which may not see its cache.
    Has no effect for programs that run on devices of several processes, which compile such programs together.
    """
    shared = any(device.process_index != jax.process_index() for devices in device_sets for device in devices)
    if not shared and not is_lead():
        wait_for_all("the first process has compiled")
        send_new_programs()
    yield
    if not shared and is_lead():
        wait_for_all("the first process has compiled")
        send_new_programs()


def disable_cache_for(device_sets: Sequence[Sequence[Device]]) -> None:
    """Permanently disables the persistent cache if programs for any of these device sets must not be read from it.

    For programs that run on these device sets but are not compiled by `compile_on_each`, such as sums.
    """
    if jax.default_backend() == "tpu" and not all(map(_includes_first_chip, device_sets)):
        logger.info("programs are compiled at every start: those of single TPU chips cannot be kept for the next one")
        _set_cache_directory(None)


def _includes_first_chip(devices: Sequence[Device]) -> bool:
    """Returns true if programs for these TPU chips can be cached, which requires the first chip of their slice.

    Programs for other chips check the coordinates of the chip they run on (`scheckge: Invalid physical row` in libtpu's
    output), so a program compiled for one chip cannot run on another. Some versions of libtpu even read such programs
    with wrong coordinates, which halts the very chips that they were compiled for
    (https://github.com/jax-ml/jax/issues/38004).
    """
    return any(not any(device.coords) for device in devices)


@contextmanager
def _without_cache() -> Iterator[None]:
    """Prevents use of the persistent cache; CPU programs read from it lack functions when they are serialized."""
    directory = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    _set_cache_directory(None)
    try:
        yield
    finally:
        _set_cache_directory(directory)


def _set_cache_directory(directory: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", directory)
    # JAX opens the cache once and then ignores the setting. A reset makes it read the setting a second time.
    compilation_cache.reset_cache()
