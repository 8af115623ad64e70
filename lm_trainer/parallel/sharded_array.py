"""Arrays that are built where they lie, a little at a time: the host never holds the whole of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

HOST_BYTES = 64 * 2**20

Slices = tuple[slice, ...]
Parts = Callable[[Slices], Iterable[tuple[tuple[int, ...], np.ndarray]]]
"""For a block of the array (a slice with start and stop for each dimension) the parts that it consists of, each with
its place inside the block."""


def assemble(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, parts: Parts, *, host_bytes: int = HOST_BYTES
) -> jax.Array:
    """An array of which this process reads only what its own devices hold.

    Args:
        shape: of the whole array.
        dtype: of the array; parts in another one are cast, rounding to the nearest.
        sharding: where it lies.
        parts: reads a block; called once for devices that hold the same.
        host_bytes: blocks up to this size are put together on the host, larger ones on the device, part by part.
    """
    blocks: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
        blocks.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in blocks.items():
        block = tuple(slice(start, stop) for start, stop in bounds)
        size = tuple(stop - start for start, stop in bounds)
        small = int(np.prod(size)) * np.dtype(dtype).itemsize <= host_bytes
        arrays += (_on_host if small else _on_devices)(size, np.dtype(dtype), devices, parts(block))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _on_host(shape: tuple[int, ...], dtype: np.dtype, devices: list[Any], parts: Iterable[Any]) -> list[Any]:
    whole = np.empty(shape, dtype)
    for start, part in parts:
        whole[tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))] = part
    return [jax.device_put(whole, device) for device in devices]


def _on_devices(shape: tuple[int, ...], dtype: np.dtype, devices: list[Any], parts: Iterable[Any]) -> list[Any]:
    wholes = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for start, part in parts:
        at = tuple(np.int32(each) for each in start)
        cast = part.astype(dtype, copy=False)
        wholes = [
            _write(whole, jax.device_put(cast, device), at) for whole, device in zip(wholes, devices, strict=True)
        ]
        # Copies are asynchronous: without waiting, the parts would pile up on the host.
        jax.block_until_ready(wholes)
    return wholes


@partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, part: jax.Array, at: tuple[Any, ...]) -> jax.Array:
    """`whole` with `part` in it at this place, in the memory of `whole`."""
    return jax.lax.dynamic_update_slice(whole, part, at)
