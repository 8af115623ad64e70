"""Sharded arrays built block by block on their devices: the host never holds the whole of a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lm_trainer.parallel.rehearsal import put_on

HOST_BYTES = 64 * 2**20
"""Size up to which a block is put together on the host: a few copies of it are no burden there, and one large transfer
is quicker than many small ones."""

Slices = tuple[slice, ...]
ReadParts = Callable[[Slices], Iterable[tuple[tuple[int, ...], np.ndarray]]]
"""From a block of the array (a slice with start and stop for each dimension) to the parts that make it up, each with
its offset inside the block."""


def replicate(value: np.generic, mesh: Mesh) -> jax.Array:
    """Returns a scalar on every device of the mesh; of several processes, each gives the same value.

    `jax.device_put` would make the processes compare their values, and with it wait for one another.
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    if (rehearsed := put_on(value, sharding, "batch")) is not None:
        return rehearsed
    devices = mesh.local_devices
    return jax.make_array_from_single_device_arrays((), sharding, jax.device_put([value] * len(devices), devices))


def by_device(array: jax.Array) -> dict[Any, jax.Array]:
    """The parts of an array on the devices of this process; its data are not copied."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def host_part(array: np.ndarray | jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` in the host's memory, put together from the devices' shards; nothing is gathered on a device.

    Args:
        array: all of its shards are on devices of this process.
        index: of the first dimensions.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)[index]
    if array.sharding.is_fully_replicated:
        return np.asarray(array.addressable_data(0)[index])
    part = np.empty(array.shape[len(index) :], array.dtype)
    for shard in array.addressable_shards:
        bounds = [cut.indices(size)[:2] for cut, size in zip(shard.index, array.shape, strict=True)]
        first, rest = bounds[: len(index)], bounds[len(index) :]
        # Of devices that hold the same, one is asked.
        if shard.replica_id == 0 and all(start <= at < stop for at, (start, stop) in zip(index, first, strict=True)):
            there = tuple(at - start for at, (start, _) in zip(index, first, strict=True))
            part[tuple(slice(*each) for each in rest)] = np.asarray(shard.data[there])
    return part


def gather_to_host(array: jax.Array, *, device_bytes: int = HOST_BYTES) -> np.ndarray:
    """An array that devices of several processes have parts of; all processes call it, and all get it.

    Args:
        array: cut by a `NamedSharding`.
        device_bytes: gathered on each device at a time, where the first dimension is not cut.
    """
    sharding: Any = array.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    rows = array.shape[0] if array.ndim else 1
    size = max(1, rows * device_bytes // max(array.nbytes, 1))
    if size >= rows or (len(sharding.spec) and sharding.spec[0]):
        return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(array).addressable_data(0))
    take = jax.jit(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, size), out_shardings=everywhere)
    whole = np.empty(array.shape, array.dtype)
    for start in (*range(0, rows - size, size), rows - size):
        piece = take(array, replicate(np.int32(start), sharding.mesh))
        whole[start : start + size] = np.asarray(piece.addressable_data(0))
    return whole


def make_sharded_array(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, parts: ReadParts, *, host_bytes: int = HOST_BYTES
) -> jax.Array:
    """Returns an array of which this process reads only the blocks that its own devices hold.

    Args:
        shape: of the whole array.
        dtype: of the array; parts in another one are cast, rounding to the nearest.
        sharding: of the array.
        parts: reads a block; called once for devices that hold the same.
        host_bytes: blocks up to this size are put together on the host, larger ones on the device, part by part.
    """
    blocks: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        blocks.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in blocks.items():
        block = tuple(slice(start, stop) for start, stop in bounds)
        size = tuple(stop - start for start, stop in bounds)
        small = int(np.prod(size)) * np.dtype(dtype).itemsize <= host_bytes
        arrays += (_on_host if small else _on_devices)(size, np.dtype(dtype), devices, parts(block))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _on_host(shape: tuple[int, ...], dtype: np.dtype, devices: list[Any], parts: Iterable[Any]) -> list[Any]:
    block = np.empty(shape, dtype)
    for offset, part in parts:
        block[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
    return [jax.device_put(block, device) for device in devices]


def _on_devices(shape: tuple[int, ...], dtype: np.dtype, devices: list[Any], parts: Iterable[Any]) -> list[Any]:
    blocks = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for offset, part in parts:
        # Offsets as arguments, not constants: one compiled program writes all parts of a shape.
        # The cast is done on the host, as for small blocks, and halves the transfer where it is to bfloat16.
        cast = part.astype(dtype, copy=False)
        at = tuple(np.int32(each) for each in offset)
        placed = [jax.device_put((cast, at), device) for device in devices]
        blocks = [_write(block, *given) for block, given in zip(blocks, placed, strict=True)]
        # Copies are asynchronous: without waiting, the parts would pile up on the host.
        jax.block_until_ready(blocks)
    return blocks


# The block is donated, so that writing a part does not copy it.
@partial(jax.jit, donate_argnums=0)
def _write(block: jax.Array, part: jax.Array, offset: tuple[Any, ...]) -> jax.Array:
    """Returns `block` with `part` in it at `offset`, in the memory of `block`."""
    return jax.lax.dynamic_update_slice(block, part, offset)
