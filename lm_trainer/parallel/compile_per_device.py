"""One program for several places of this process: compiled once where that is possible."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import xla_client


def compile_for_each(
    compile_for: Callable[[int], jax.stages.Compiled], places: Sequence[Sequence[Any]]
) -> list[jax.stages.Compiled]:
    """The same program for each of several places.

    Args:
        compile_for: compiles for the place of that number.
        places: the devices of each, in the order of its mesh.
    """
    rest = range(1, len(places))
    if rest and places[0][0].platform == "cpu":
        with _without_cache():
            first = compile_for(0)
        return [first, *_relocated(first, places[0], [places[i] for i in rest])]
    first = compile_for(0)
    # Elsewhere the compilation cache serves all devices alike: the others are read from it, and with them the choices
    # of kernels that were made by timing.
    with ThreadPoolExecutor() as pool:
        return [first, *pool.map(compile_for, rest)]


@contextmanager
def _without_cache() -> Iterator[None]:
    """Neither reads nor writes the persistent cache: what was read from it lacks functions when it is written again."""
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        compilation_cache.reset_cache()


def _relocated(
    compiled: jax.stages.Compiled, devices: Sequence[Any], places: Sequence[Sequence[Any]]
) -> Iterator[jax.stages.Compiled]:
    """The same machine code, loaded for other devices: a small part of the time of compiling it."""
    content, inputs, outputs = serialize_executable.serialize(compiled)
    for to in places:
        executable, info, no_kwargs = _Loader(content, devices, to).load()
        yield jax.stages.Compiled(executable.load(), [], inputs.unflatten(info), outputs, no_kwargs=no_kwargs)


class _Loader(serialize_executable._JaxPjrtUnpickler):
    """JAX's own loader, which finds devices by their number, with other devices under those numbers."""

    def __init__(self, content: bytes, devices: Sequence[Any], to: Sequence[Any]):
        super().__init__(io.BytesIO(content), to[0].client, list(to))
        self.devices_by_id = {before.id: after for before, after in zip(devices, to, strict=True)}
        self._options = xla_client.CompileOptions()
        self._options.num_replicas, self._options.num_partitions = 1, len(to)
        self._options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in to]]))

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if pid[0] == "exec":
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self._options)
        return super().persistent_load(pid)
