"""Sizes of the copies in host memory from which a save writes its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax


def local_bytes(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the number of bytes of each array that the devices of this process hold, without replicas."""
    # Replicas of a shard have equal indices.
    shards = {
        name: {str(shard.index): shard.data.nbytes for shard in x.addressable_shards} for name, x in arrays.items()
    }
    return {name: sum(sizes.values()) for name, sizes in shards.items()}


def group_by_bytes(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Yields groups of array names, in order. A group has at most `limit` bytes in total, or contains a single array.

    Args:
        sizes: number of bytes of each array.
        limit: maximum number of bytes of a group with several arrays.
    """
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group
