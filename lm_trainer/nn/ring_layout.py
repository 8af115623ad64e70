"""Layout of a row on the devices of a ring, and the blocks that each device computes.

A row is split into 2n chunks, and each chunk into blocks; device i of n has the chunks i and 2n - 1 - i.

Shape letters: B rows, S positions of this device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.attention_kernel import AttentionMetadata, first_reason
from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.parallel.collectives import axis_index, axis_size, permute

Index = int | jax.Array
"""Index of a device or a block: an int, or a traced int32 scalar."""
_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 64


def unsupported_reason(spec: AttentionSpec, metadata: AttentionMetadata) -> str | None:
    """Returns the reason why a ring cannot compute attention of `spec`; None if it can."""
    length, devices, size = metadata.queries, metadata.devices, spec.scores.block_size
    chunk = length // 2
    block_size = _block_size(chunk, size)
    return first_reason((
        (metadata.cached, "it does not decode with a cache"),
        (length % 2 != 0, f"rows of {metadata.keys} positions cannot be cut into two pieces for each of {devices} "
         f"devices; choose a model.seq_len that {2 * devices} divides"),
        (size is not None and chunk % block_size != 0,
         f"flash_attention_block_size={size} does not divide the {chunk} positions of half a device's part"),
        (size is None and block_size < min(chunk, _SMALLEST_BLOCK),
         f"no block of {_SMALLEST_BLOCK} to {_LARGEST_BLOCK} positions divides the {chunk} of half a device's part"),
    ))  # fmt: skip


def _block_size(chunk: int, size: int | None) -> int:
    """Returns the number of positions of a block: `size`, or the largest divisor of the chunk size up to 512."""
    if size is not None:
        return max(1, min(size, chunk))
    return next((b for b in range(min(chunk, _LARGEST_BLOCK), 0, -1) if chunk % b == 0), 1)


class RingLayout(NamedTuple):
    """Blocks of a row on the devices of a ring. Indices of devices and blocks may be ints or int32 scalars."""

    devices: int
    blocks: int
    """Number of blocks of a chunk; each device has two chunks."""
    size: int
    """Number of positions of a block."""
    reach: int | None
    """Number of earlier blocks that the window of a query extends into; None: all of them."""

    @classmethod
    def for_rows(cls, spec: AttentionSpec, queries: int, devices: int) -> RingLayout:
        """Returns the layout of rows with `queries` positions per device, which `unsupported_reason` must accept."""
        chunk = queries // 2
        size = _block_size(chunk, spec.scores.block_size)
        return cls(devices, chunk // size, size, None if spec.window is None else -(-(spec.window - 1) // size))

    def chunk_index(self, device: Index, half: Index) -> Index:
        """Returns the index in the row of the first (half 0) or second (half 1) chunk of a device."""
        return device + half * (2 * self.devices - 1 - 2 * device)

    def block_index(self, device: Index, local: Index) -> Index:
        """Returns the index in the row of a device's local block."""
        half = local // self.blocks
        return self.chunk_index(device, half) * self.blocks + local % self.blocks

    def visible_blocks(self, query_block: Index, first: Index) -> tuple[Index, Index]:
        """Returns the range [low, high) of blocks visible to a query block, in the chunk that begins at `first`."""
        low = first if self.reach is None else jnp.clip(query_block - self.reach, first, first + self.blocks)
        return low, jnp.clip(query_block + 1, first, first + self.blocks)

    def routes(self) -> list[tuple[int, int, int]]:
        """Routes on which keys and values travel from their device: (number of devices per hop, hops to the first stop
        that counts, hops to the last one).

        A single route goes all the way around the ring. With a shorter window, routes visit only some devices in each
        direction, because the two chunks of a device are adjacent to chunks of its neighbors on both sides.
        """
        neighbours = None if self.reach is None else -(-self.reach // self.blocks)
        if neighbours is None or 2 * neighbours >= self.devices - 1:
            return [(1, 0, self.devices - 1)]
        return [(1, 0, neighbours), (-1, 1, neighbours)] if neighbours else [(1, 0, 0)]

    def num_computed_blocks(self, device: int) -> int:
        """Returns the number of blocks of scores, of `size` x `size`, that a device computes for one head of a row."""
        query_blocks = np.array([self.block_index(device, local) for local in range(2 * self.blocks)])
        return int((1 + (query_blocks if self.reach is None else np.minimum(query_blocks, self.reach))).sum())


def to_zigzag(x_BS: jax.Array) -> jax.Array:
    """Reorders consecutive positions on each device into the device's chunks of a ring; any dimensions may follow."""
    routes = _half_routes()
    if not routes:
        return x_BS
    return _join_chunks(
        *(permute(half, "context", route) for half, route in zip(jnp.split(x_BS, 2, 1), routes, strict=True))
    )


def from_zigzag(x_BS: jax.Array) -> jax.Array:
    """The inverse of `to_zigzag`."""
    routes = [[(target, source) for source, target in route] for route in _half_routes()]
    if not routes:
        return x_BS
    halves = jnp.split(_join_chunks(*jnp.split(x_BS, 2, 1)), 2, 1)
    return jnp.concatenate([permute(half, "context", route) for half, route in zip(halves, routes, strict=True)], 1)


def _join_chunks(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Joins a chunk with an even index and one with an odd index in local order: device i has chunk i first."""
    swap = axis_index("context") % 2 == 1
    return jnp.concatenate([jnp.where(swap, odd, even), jnp.where(swap, even, odd)], 1)


def _half_routes() -> list[list[tuple[int, int]]]:
    """Returns (from, to) pairs of devices, for chunks with even and with odd indices; both are empty for one device."""
    devices = axis_size("context")
    owners = [*range(devices), *reversed(range(devices))]
    return [[(i, owners[2 * i + odd]) for i in range(devices)] for odd in (0, 1)] if devices > 1 else []
