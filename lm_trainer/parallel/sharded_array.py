"""Sharded arrays that are built block by block on their devices; the host never holds a large array as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.parallel.rehearsal import put_abstract

HOST_BYTES = 64 * 2**20
"""Maximum size of a block that is assembled on the host, in bytes. The host can afford a few copies of this size, and
one large transfer is faster than many small ones."""

Slices = tuple[slice, ...]
Parts = Iterable[tuple[tuple[int, ...], np.ndarray]]
"""Parts of a block, each with its offset inside the block."""
ReadParts = Callable[[Slices], Parts]
"""Reads a block of the array, given as a slice with start and stop for each dimension. Returns its parts, each with its
offset inside the block."""


def replicate(value: np.generic, mesh: Mesh) -> jax.Array:
    """Puts a scalar on every device of the mesh. All processes must pass the same value.

    `jax.device_put` would make the processes compare their values, and thus wait for one another.
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    if (rehearsed := put_abstract(value, sharding, "batch")) is not None:
        return rehearsed
    devices = mesh.local_devices
    return jax.make_array_from_single_device_arrays((), sharding, jax.device_put([value] * len(devices), devices))


def shards_by_device(array: jax.Array) -> dict[Device, jax.Array]:
    """Returns the parts of an array on the devices of this process, without copying data."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def index_on_host(array: np.ndarray | jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Returns `array[index]` in host memory, assembled from the shards without a gather on a device.

    Args:
        array: an array all of whose shards are on devices of this process.
        index: index into the first dimensions.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)[index]
    if array.sharding.is_fully_replicated:
        return np.asarray(array.addressable_data(0)[index])
    result = np.empty(array.shape[len(index) :], array.dtype)
    for shard in array.addressable_shards:
        bounds = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
        indexed, remaining = bounds[: len(index)], bounds[len(index) :]
        # Only one copy of each replicated shard is read.
        if shard.replica_id == 0 and all(start <= i < stop for i, (start, stop) in zip(index, indexed, strict=True)):
            local = tuple(i - start for i, (start, _) in zip(index, indexed, strict=True))
            result[tuple(slice(*limits) for limits in remaining)] = np.asarray(shard.data[local])
    return result


def gather_to_host(array: jax.Array, *, device_bytes: int = HOST_BYTES) -> np.ndarray:
    """Copies an array that is sharded over processes to the host of each process. All processes must call it.

    Args:
        array: an array with a `NamedSharding`.
        device_bytes: number of bytes that are gathered on each device at a time, if the first dimension is not sharded.
    """
    sharding: PyTree = array.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    rows = array.shape[0] if array.ndim else 1
    size = max(1, rows * device_bytes // max(array.nbytes, 1))
    if size >= rows or (len(sharding.spec) and sharding.spec[0]):
        return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(array).addressable_data(0))
    take = jax.jit(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, size), out_shardings=everywhere)
    result = np.empty(array.shape, array.dtype)
    for start in (*range(0, rows - size, size), rows - size):
        piece = take(array, replicate(np.int32(start), sharding.mesh))
        result[start : start + size] = np.asarray(piece.addressable_data(0))
    return result


def make_sharded_array(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding, parts: ReadParts, *, host_bytes: int = HOST_BYTES
) -> jax.Array:
    """Builds an array. This process reads only the blocks that its devices hold.

    Args:
        shape: shape of the global array.
        dtype: dtype of the array; parts in another dtype are cast with rounding to nearest.
        sharding: sharding of the array.
        parts: reads a block. Called once per block, even if several devices hold it.
        host_bytes: maximum size in bytes of blocks that are assembled on the host; larger blocks are written part by
            part on the device.
    """
    blocks: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        blocks.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in blocks.items():
        block = tuple(slice(start, stop) for start, stop in bounds)
        size = tuple(stop - start for start, stop in bounds)
        small = int(np.prod(size)) * np.dtype(dtype).itemsize <= host_bytes
        arrays += (_assemble_on_host if small else _assemble_on_devices)(size, np.dtype(dtype), devices, parts(block))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _assemble_on_host(shape: tuple[int, ...], dtype: np.dtype, devices: list[Device], parts: Parts) -> list[jax.Array]:
    block = np.empty(shape, dtype)
    for offset, part in parts:
        region = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
        block[region] = part
    return [jax.device_put(block, device) for device in devices]


def _assemble_on_devices(
    shape: tuple[int, ...], dtype: np.dtype, devices: list[Device], parts: Parts
) -> list[jax.Array]:
    blocks = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for offset, part in parts:
        # Offsets are arguments, not constants, so that one compiled program writes all parts of a shape.
        # Cast on the host, as for small blocks, because this halves the transfer if the cast is to bfloat16.
        cast = part.astype(dtype, copy=False)
        start = tuple(np.int32(i) for i in offset)
        placed = [jax.device_put((cast, start), device) for device in devices]
        blocks = [_write(block, *arguments) for block, arguments in zip(blocks, placed, strict=True)]
        # Copies are asynchronous; without waiting, the parts would accumulate on the host.
        jax.block_until_ready(blocks)
    return blocks


# The block is donated, so writing a part does not copy the block.
@partial(jax.jit, donate_argnums=0)
def _write(block: jax.Array, part: jax.Array, offset: tuple[jax.Array, ...]) -> jax.Array:
    """Writes `part` into `block` at `offset`, in place."""
    return jax.lax.dynamic_update_slice(block, part, offset)
