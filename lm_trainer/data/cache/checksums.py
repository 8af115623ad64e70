"""Checksums of the files of a part: written with it, and compared when it is read.

A commit record has the SHA-256 of each file, and the first digits of the SHA-256 of each of its blocks. A reader
compares the blocks that it needs, so the first read of a row costs the same in a part of any size: on this machine each
of them once, from object storage whenever it is fetched. Earlier versions wrote no checksums of blocks: such a file is
one block, and compared once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 16
"""About the bytes that a disk reads at a time for a row."""

_DIGITS = 16
"""Hex digits of the checksum of a block."""


def checksums(content: Any) -> dict[str, Any]:
    """Returns the entry of a file in a commit record: size, checksum, and checksums of its blocks.

    Args:
        content: bytes, or a contiguous array.
    """
    content_F = np.frombuffer(content, np.uint8)
    blocks = [content_F[first : first + BLOCK_BYTES] for first in range(0, len(content_F), BLOCK_BYTES)]
    return {
        "bytes": len(content_F),
        "sha256": hashlib.sha256(content_F.data).hexdigest(),
        "block_bytes": BLOCK_BYTES,
        "blocks": "".join(hashlib.sha256(block.data).hexdigest()[:_DIGITS] for block in blocks),
    }


def is_intact(content: Any, noted: Mapping[str, Any]) -> bool:
    """Compares a whole file with all that a commit record has about it."""
    computed = checksums(content)
    return noted["sha256"] == computed["sha256"] and all(
        noted.get(key, computed[key]) == computed[key] for key in computed
    )


class BlockSums:
    """Checksums of the blocks of one file, and the blocks that have been compared. Safe to use from several threads.

    Args:
        noted: by `checksums`; without the last two keys by an earlier version.
        size: bytes of the file.

    Raises:
        ValueError: if there are not as many as the file has blocks.
    """

    def __init__(self, noted: Mapping[str, Any], size: int):
        blocks = noted.get("blocks")
        self._size = size
        self._block_bytes = max(size if blocks is None else int(noted["block_bytes"]), 1)
        self.one_sum = blocks is None
        """True if there is one checksum, for all of the file."""
        self._sums = bytes.fromhex(noted["sha256"] if blocks is None else blocks)
        self._width = len(self._sums) if blocks is None else _DIGITS // 2
        count = -(-size // self._block_bytes)
        if len(self._sums) < count * self._width:
            raise ValueError(f"{len(self._sums)} bytes of checksums for {count} blocks")
        # One byte for each block, which is 1 once the block was compared.
        self._compared = bytearray(count)

    def blocks(self, first: int, last: int) -> range:
        """Returns the blocks of the bytes [first, last)."""
        return range(first // self._block_bytes, -(-last // self._block_bytes))

    def pending(self, first: int, last: int) -> list[int]:
        """Returns the blocks of the bytes [first, last) that have not been compared."""
        blocks = self.blocks(first, last)
        if self._compared.find(0, blocks.start, blocks.stop) < 0:
            return []
        return [block for block in blocks if not self._compared[block]]

    @property
    def all_compared(self) -> bool:
        """True once every block has been compared."""
        return self._compared.find(0) < 0

    def bytes_of(self, block: int) -> tuple[int, int]:
        """Returns the bytes [first, last) of a block."""
        first = block * self._block_bytes
        return first, min(first + self._block_bytes, self._size)

    def compare(self, block: int, content: Any) -> bool:
        """Returns whether a block is as it was written."""
        noted = self._sums[block * self._width : (block + 1) * self._width]
        intact = hashlib.sha256(content).digest()[: self._width] == noted
        if intact:
            self._compared[block] = 1
        return intact


class CheckedItems:
    """Items of a part, whose blocks are compared when they are first read.

    Args:
        items: can be sliced.
        content_F: its bytes, which can be sliced too.
        byte_range: the bytes [first, last) of `count` items from `start` on.
        sums: of the bytes.
        damaged: the error for a block that is not as it was written.
    """

    def __init__(
        self,
        items: Any,
        content_F: Any,
        byte_range: Callable[[int, int], tuple[int, int]],
        sums: BlockSums,
        damaged: Callable[[int], Exception],
    ):
        self._items, self._content_F, self._byte_range = items, content_F, byte_range
        self._sums, self._damaged = sums, damaged

    def fastest(self) -> Any:
        """Returns what is sliced fastest: the items themselves, once all of their blocks have been compared."""
        return self._items if self._sums.all_compared else self

    def __getitem__(self, items: slice) -> Any:
        for block in self._sums.pending(*self._byte_range(items.start, items.stop - items.start)):
            first, last = self._sums.bytes_of(block)
            if not self._sums.compare(block, self._content_F[first:last]):
                raise self._damaged(first)
        return self._items[items]
