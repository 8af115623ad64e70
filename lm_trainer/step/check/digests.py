"""Digests of the sums that devices compute for microbatches.

Shape letters: L is the number of arrays of the sums, S the number of batch shards in one array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.core.bits import flat_index, mix_bits, read_bits
from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.mesh_group import MeshWide
from lm_trainer.step.dispatch.microbatches import Microbatch
from lm_trainer.step.loss.gradient import Sums

_DIGITS = 16
_SALT = 0x9E3779B9


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
    """Returns a checksum of the bits of each array for each batch shard, as uint32 [L, S]."""
    return jnp.stack([checksum(x) for x in jax.tree.leaves(sums)])


def checksum(x: jax.Array) -> jax.Array:
    """Returns a checksum of the bits of an array [S, ...] for each batch shard, as uint32 [S].

    A checksum is the sum of a permutation of the bits of each element, which depends on its index, modulo 2^32. A
    change of a single element therefore always changes it, and any other change does so except for one in 2^32. In a
    linear sum, an even number of wrong signs would cancel. Integer sums are exact in any order, so the checksum does
    not depend on the sharding inside a group.
    """
    mixed = mix_bits(read_bits(x) ^ mix_bits(flat_index(x, first_axis=1) + jnp.uint32(_SALT)))
    return mixed.sum(axis=tuple(range(1, x.ndim)), dtype=jnp.uint32)


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
