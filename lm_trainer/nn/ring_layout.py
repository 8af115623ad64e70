"""The layout of a row on the devices of a ring, and the blocks that each computes.

A row is cut into 2n chunks, of which device i of n has the chunks i and 2n - 1 - i, and each chunk into blocks.

Shape letters: B rows, S positions of this device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.attention_kernel import AttentionMetadata, first_reason
from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.parallel.collectives import axis_index, axis_size, permute

_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 64


def unsupported_reason(spec: AttentionSpec, metadata: AttentionMetadata) -> str | None:
    """The reason why a ring cannot compute attention of `spec`; None when it can."""
    length, devices, size = metadata.queries, metadata.devices, spec.scores.block_size
    chunk = length // 2
    found = _block_size(chunk, size)
    return first_reason((
        (metadata.cached, "it does not decode with a cache"),
        (length % 2 != 0, f"rows of {metadata.keys} positions cannot be cut into two pieces for each of {devices} "
         f"devices; choose a model.seq_len that {2 * devices} divides"),
        (size is not None and chunk % found != 0,
         f"flash_attention_block_size={size} does not divide the {chunk} positions of half a device's part"),
        (size is None and found < min(chunk, _SMALLEST_BLOCK),
         f"no block of {_SMALLEST_BLOCK} to {_LARGEST_BLOCK} positions divides the {chunk} of half a device's part"),
    ))  # fmt: skip


def _block_size(chunk: int, size: int | None) -> int:
    """Positions of a block: `size`, or the largest up to 512 that divides a chunk."""
    if size is not None:
        return max(1, min(size, chunk))
    return next((b for b in range(min(chunk, _LARGEST_BLOCK), 0, -1) if chunk % b == 0), 1)


class RingLayout(NamedTuple):
    """The blocks of a row on the devices of a ring. Numbers of devices and blocks may be ints or int32 scalars."""

    devices: int
    blocks: int
    """Blocks of a chunk; each device has two chunks."""
    size: int
    """Positions of a block."""
    reach: int | None
    """Blocks before its own that a query's window reaches into; None: all."""

    @classmethod
    def of(cls, spec: AttentionSpec, queries: int, devices: int) -> RingLayout:
        """The layout of rows of `queries` positions on each of `devices`, which `unsupported_reason` lets pass."""
        chunk = queries // 2
        size = _block_size(chunk, spec.scores.block_size)
        return cls(devices, chunk // size, size, None if spec.window is None else -(-(spec.window - 1) // size))

    def chunk(self, device: Any, half: Any) -> Any:
        """The chunk that a device has as its first (0) or second (1)."""
        return device + half * (2 * self.devices - 1 - 2 * device)

    def block(self, device: Any, local: Any) -> Any:
        """The number in the row of a block of a device."""
        half = local // self.blocks
        return self.chunk(device, half) * self.blocks + local % self.blocks

    def seen(self, query_block: Any, first: Any) -> tuple[Any, Any]:
        """The blocks [low, high) of the chunk from block `first` on that a block of queries sees anything of."""
        low = first if self.reach is None else jnp.clip(query_block - self.reach, first, first + self.blocks)
        return low, jnp.clip(query_block + 1, first, first + self.blocks)

    def journeys(self) -> list[tuple[int, int, int]]:
        """The ways of keys and values from home: (devices of one hop, hops to the first stop that counts, to the last).

        All the way round; with a window that ends before, some devices in each direction, since the chunks on both
        sides of one of a device's two are those of its neighbours.
        """
        near = None if self.reach is None else -(-self.reach // self.blocks)
        if near is None or 2 * near >= self.devices - 1:
            return [(1, 0, self.devices - 1)]
        return [(1, 0, near), (-1, 1, near)] if near else [(1, 0, 0)]

    def computed_blocks(self, device: int) -> int:
        """Blocks of scores, of `size` queries and as many keys, that a device computes for one head of a row."""
        own = np.array([self.block(device, local) for local in range(2 * self.blocks)])
        return int((1 + (own if self.reach is None else np.minimum(own, self.reach))).sum())


def to_zigzag(x_BS: jax.Array) -> jax.Array:
    """From successive positions on each device to the chunks that it has in a ring; any dimensions may follow."""
    ways = _ways_of_halves()
    if not ways:
        return x_BS
    return _joined(*(permute(half, "context", way) for half, way in zip(jnp.split(x_BS, 2, 1), ways, strict=True)))


def from_zigzag(x_BS: jax.Array) -> jax.Array:
    """The inverse of `to_zigzag`."""
    ways = [[(there, here) for here, there in way] for way in _ways_of_halves()]
    if not ways:
        return x_BS
    halves = jnp.split(_joined(*jnp.split(x_BS, 2, 1)), 2, 1)
    return jnp.concatenate([permute(half, "context", way) for half, way in zip(halves, ways, strict=True)], 1)


def _joined(even: jax.Array, odd: jax.Array) -> jax.Array:
    """A chunk of even number and one of odd number as they lie here: device i has chunk i first."""
    swap = axis_index("context") % 2 == 1
    return jnp.concatenate([jnp.where(swap, odd, even), jnp.where(swap, even, odd)], 1)


def _ways_of_halves() -> list[list[tuple[int, int]]]:
    """The (from, to) devices of the chunks of even number, and of those of odd number; none for one device."""
    devices = axis_size("context")
    place = [*range(devices), *reversed(range(devices))]
    return [[(i, place[2 * i + odd]) for i in range(devices)] for odd in (0, 1)] if devices > 1 else []
