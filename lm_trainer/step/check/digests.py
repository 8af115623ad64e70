"""Digests of the sums that devices compute for microbatches.

Shape letters: L is the number of arrays of the sums, S the number of batch shards in one array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.mesh_group import MeshWide
from lm_trainer.step.dispatch.microbatches import Microbatch
from lm_trainer.step.loss.gradient import Sums

_DIGITS = 16
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class DigestTap:
    """Receives the sums of microbatches while they are computed, and keeps digests of some of them.

    Args:
        devices: devices that compute the microbatches.
        indices: arrays of the placed batch that contain the indices of the microbatches to keep.
    """

    def __init__(self, devices: DeviceGroups | MeshWide, indices: Collection[jax.Array]):
        self._devices, self._watched = devices, {id(index) for index in indices}
        self._parts: dict[int, list[jax.Array]] = {}

    def __call__(self, group: int, microbatch: Microbatch, sums: Sums) -> None:
        """Receives the sums of one stage of a microbatch, which local group number `group` has computed."""
        # The digest is enqueued before the sums are added up, which consumes them.
        if id(microbatch.index) in self._watched:
            self._parts.setdefault(group, []).append(wait_on_cpu(_checksums(sums)))

    def read(self) -> dict[int, str]:
        """Waits for the digests, and returns them by index of the group among all batch shards."""
        digests: dict[int, str] = {}
        for group, parts in self._parts.items():
            columns: dict[int, list[bytes]] = {}
            for part in parts:
                for column, content in _local_columns(part).items():
                    columns.setdefault(column, []).append(content)
            first = 0 if isinstance(self._devices, MeshWide) else self._devices.groups[group].index
            for column, contents in columns.items():
                digests[first + column] = hashlib.sha256(b"".join(contents)).hexdigest()[:_DIGITS]
        return digests


@jax.jit
def _checksums(sums: Sums) -> jax.Array:
    """Returns a checksum of the bits of each array for each batch shard, as uint32 [L, S].

    A checksum is the sum over i of bits(x_i) * (2 i + 1), modulo 2^32. Every factor is odd, so a single flipped bit
    always changes it. Integer sums are exact in any order, so it does not depend on the sharding inside a group.
    """
    return jnp.stack([checksum(x) for x in jax.tree.leaves(sums)])


def checksum(x: jax.Array) -> jax.Array:
    """Returns a checksum of the bits of an array [S, ...] for each batch shard, as uint32 [S]; see `_checksums`."""
    bits_S = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape[1:], start=1):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    axes = tuple(range(1, x.ndim))
    return (bits_S * (index * jnp.uint32(2) + jnp.uint32(1))).sum(axis=axes, dtype=jnp.uint32)


def _local_columns(checksums: jax.Array) -> Mapping[int, bytes]:
    """Returns the checksums [L] of each batch shard of this process."""
    columns = {}
    for shard in checksums.addressable_shards:
        first, data = shard.index[1].start or 0, np.asarray(shard.data)
        columns |= {first + offset: np.ascontiguousarray(data[:, offset]).tobytes() for offset in range(data.shape[1])}
    return columns


def read_on_host(values: PyTree, device: object) -> PyTree:
    """Returns the part of each array on a device, as NumPy arrays."""
    return jax.tree.map(
        lambda x: np.asarray(next(shard.data for shard in x.addressable_shards if shard.device == device)), values
    )
