"""Checksums of the files of a part, which are written with the part and verified when it is read.

A commit record has the SHA-256 of each file, and the first digits of the SHA-256 of each of its blocks. A reader
verifies only the blocks it needs, so the cost of the first read of a row does not depend on the size of the part.
Blocks are verified once on a local disk, and on every fetch from object storage. Earlier versions wrote no block
checksums; their files are treated as a single block, which is verified once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

BLOCK_BYTES = 1 << 16
"""Approximate number of bytes that a disk reads at a time for a row."""

_BLOCK_DIGITS = 16
"""Number of hex digits of a block's checksum."""


class Sliceable(Protocol):
    """An array-like object that supports slicing."""

    def __getitem__(self, key: slice, /) -> np.ndarray: ...


def file_record(content: bytes | np.ndarray) -> dict[str, int | str]:
    """Returns the entry of a file in a commit record: its size, its checksum, and the checksums of its blocks.

    Args:
        content: bytes or a contiguous array.
    """
    content_F = np.frombuffer(content, np.uint8)
    blocks = [content_F[first : first + BLOCK_BYTES] for first in range(0, len(content_F), BLOCK_BYTES)]
    return {
        "bytes": len(content_F),
        "sha256": hashlib.sha256(content_F.data).hexdigest(),
        "block_bytes": BLOCK_BYTES,
        "blocks": "".join(hashlib.sha256(block.data).hexdigest()[:_BLOCK_DIGITS] for block in blocks),
    }


def is_intact(content: bytes | np.ndarray, recorded: Mapping[str, object]) -> bool:
    """Returns True if a full file matches everything that its commit record lists for it."""
    computed = file_record(content)
    return recorded["sha256"] == computed["sha256"] and all(
        recorded.get(key, computed[key]) == computed[key] for key in computed
    )


class BlockSums:
    """Checksums of the blocks of one file, and which blocks are verified so far. Safe to use from several threads.

    Args:
        recorded: an entry made by `file_record`; an entry written by an earlier version lacks the last two keys.
        size: size of the file in bytes.

    Raises:
        ValueError: if the file has more blocks than checksums.
    """

    def __init__(self, recorded: Mapping[str, Any], size: int):
        blocks = recorded.get("blocks")
        self._size = size
        self._block_bytes = max(size if blocks is None else int(recorded["block_bytes"]), 1)
        self.one_sum = blocks is None
        """True if the file has a single checksum."""
        self._sums = bytes.fromhex(recorded["sha256"] if blocks is None else blocks)
        self._width = len(self._sums) if blocks is None else _BLOCK_DIGITS // 2
        count = -(-size // self._block_bytes)
        if len(self._sums) < count * self._width:
            raise ValueError(f"{len(self._sums)} bytes of checksums for {count} blocks")
        # One byte per block: 1 once the block is verified.
        self._compared = bytearray(count)

    def blocks_in_range(self, first: int, last: int) -> range:
        """Returns the numbers of the blocks that contain the bytes [first, last)."""
        return range(first // self._block_bytes, -(-last // self._block_bytes))

    def unverified_blocks(self, first: int, last: int) -> list[int]:
        """Returns the numbers of the unverified blocks that contain the bytes [first, last)."""
        blocks = self.blocks_in_range(first, last)
        if self._compared.find(0, blocks.start, blocks.stop) < 0:
            return []
        return [block for block in blocks if not self._compared[block]]

    @property
    def is_fully_verified(self) -> bool:
        """True once every block is verified."""
        return self._compared.find(0) < 0

    def block_byte_range(self, block: int) -> tuple[int, int]:
        """Returns the range [first, last) of a block's bytes."""
        first = block * self._block_bytes
        return first, min(first + self._block_bytes, self._size)

    def verify_block(self, block: int, content: Any) -> bool:
        """Verifies a block. Returns True if it is intact."""
        recorded = self._sums[block * self._width : (block + 1) * self._width]
        intact = hashlib.sha256(content).digest()[: self._width] == recorded
        if intact:
            self._compared[block] = 1
        return intact


class CheckedItems:
    """Items of a part, whose blocks are verified at their first read.

    Args:
        items: the items, as an object that supports slicing.
        content_F: the bytes of `items`, as an object that supports slicing.
        byte_range: maps (start, count) of items to the range [first, last) of their bytes.
        sums: the checksums of the bytes.
        damage_error: makes the error for a damaged block.
    """

    def __init__(
        self,
        items: Sliceable,
        content_F: Sliceable,
        byte_range: Callable[[int, int], tuple[int, int]],
        sums: BlockSums,
        damage_error: Callable[[int], Exception],
    ):
        self._items, self._content_F, self._byte_range = items, content_F, byte_range
        self._sums, self._damage_error = sums, damage_error

    def fastest_view(self) -> Sliceable:
        """Returns the object that is fastest to slice, which is `items` itself once all blocks are verified."""
        return self._items if self._sums.is_fully_verified else self

    def __getitem__(self, items: slice) -> np.ndarray:
        for block in self._sums.unverified_blocks(*self._byte_range(items.start, items.stop - items.start)):
            first, last = self._sums.block_byte_range(block)
            if not self._sums.verify_block(block, self._content_F[first:last]):
                raise self._damage_error(first)
        return self._items[items]
