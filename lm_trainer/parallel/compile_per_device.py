"""One program for several sets of this process's devices, compiled once where that is possible.

On a CPU, machine code is compiled for one set of devices and loaded again for each of the others. JAX has no public
way to do so: `_DeviceRemapper` uses its unpickler of executables, which `tests/parallel/test_compile_per_device.py`
checks to have the shape that is relied on here.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import xla_client

from lm_trainer.parallel.processes import is_lead, wait_for_all
from lm_trainer.parallel.target_platform import compiling_for, target_platform

logger = logging.getLogger(__name__)


def compile_on_each(
    compile_on: Callable[[int], jax.stages.Compiled],
    device_sets: Sequence[Sequence[Any]],
    *,
    by_all_processes: bool = False,
) -> list[jax.stages.Compiled]:
    """Returns the same program for each of several sets of devices.

    Args:
        compile_on: compiles for the set of that index.
        device_sets: the devices of each, in the order of its mesh.
        by_all_processes: each process of the run calls this at the same point, for sets of its own. It may then wait
            for the others.
    """
    compiled_for = target_platform()

    def compile_in_thread(index: int) -> jax.stages.Compiled:
        with compiling_for(compiled_for):
            return compile_on(index)

    others = range(1, len(device_sets))
    platform = device_sets[0][0].platform
    if others and platform == "cpu":
        with _without_cache():
            first = compile_on(0)
        return [first, *_load_on(first, device_sets[0], [device_sets[i] for i in others])]
    if platform == "tpu" and not all(map(_at_origin, device_sets)):
        with _without_cache(), ThreadPoolExecutor() as pool:
            return [*pool.map(compile_in_thread, range(len(device_sets)))]
    # A GPU's compiler chooses kernels by timing them, and may choose otherwise each time. Therefore the first program
    # of the first process is finished before all others begin: they find it in the compilation cache, which serves all
    # GPUs of a kind and all processes that see its directory, and so run the kernels that were chosen for it.
    with _after_the_first_process(device_sets) if by_all_processes and platform == "gpu" else nullcontext():
        first = compile_on(0)
    with ThreadPoolExecutor() as pool:
        return [first, *pool.map(compile_in_thread, others)]


@contextmanager
def _after_the_first_process(device_sets: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Has process 0 do first what each process does; only process 0 writes to JAX's cache of programs.

    Not where devices of several processes share a program, which they compile together.
    """
    shared = any(device.process_index != jax.process_index() for devices in device_sets for device in devices)
    if not shared and not is_lead():
        wait_for_all("the first process has compiled")
    yield
    if not shared and is_lead():
        wait_for_all("the first process has compiled")


def close_cache_for(device_sets: Sequence[Sequence[Any]]) -> None:
    """Turns the persistent cache off, for good, where programs of any of these sets may not be read from it.

    For what runs on each of them without having been compiled by `compile_on_each`, such as sums.
    """
    if jax.default_backend() == "tpu" and not all(map(_at_origin, device_sets)):
        logger.info("programs are compiled at every start: those of single TPU chips cannot be kept for the next one")
        _set_cache(None)


def _at_origin(devices: Sequence[Any]) -> bool:
    """Tells whether programs of these TPU chips can be kept: whether the first chip of their slice is among them.

    All others check where they run, by coordinates (`scheckge: Invalid physical row` in what libtpu compiles). So no
    chip takes what was compiled for another, and some versions of libtpu read such programs with wrong coordinates,
    which halts the very chips that they were compiled for (https://github.com/jax-ml/jax/issues/38004).
    """
    return any(not any(device.coords) for device in devices)


@contextmanager
def _without_cache() -> Iterator[None]:
    """Neither reads nor writes the persistent cache; of a CPU, what is read from it lacks functions when serialized."""
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    _set_cache(None)
    try:
        yield
    finally:
        _set_cache(kept)


def _set_cache(directory: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", directory)
    # JAX opens the cache once and then ignores the setting; a reset makes it look again.
    compilation_cache.reset_cache()


def _load_on(
    compiled: jax.stages.Compiled, devices: Sequence[Any], device_sets: Sequence[Sequence[Any]]
) -> Iterator[jax.stages.Compiled]:
    """Loads machine code made for `devices` on other sets of devices, in a small part of the time of compiling it."""
    content, inputs, outputs = serialize_executable.serialize(compiled)
    for to in device_sets:
        executable, args_info, no_kwargs = _DeviceRemapper(content, devices, to).load()
        # As `serialize_executable.deserialize_and_load` does, which takes no other devices than those compiled for.
        yield jax.stages.Compiled(executable.load(), [], inputs.unflatten(args_info), outputs, no_kwargs=no_kwargs)


class _DeviceRemapper(serialize_executable._JaxPjrtUnpickler):
    """JAX's unpickler of executables, which looks devices up by their id, with other devices under those ids."""

    def __init__(self, content: bytes, devices: Sequence[Any], to: Sequence[Any]):
        super().__init__(io.BytesIO(content), to[0].client, list(to))
        self.devices_by_id = {before.id: after for before, after in zip(devices, to, strict=True)}
        # The serialized program names its devices as well; without these options XLA would load it for those.
        self._options = xla_client.CompileOptions()
        self._options.num_replicas, self._options.num_partitions = 1, len(to)
        self._options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in to]]))

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        """Resolves what is not pickled itself: `("exec", program)`, ("device", id) and the like."""
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options)
        return super().persistent_load(pid)
