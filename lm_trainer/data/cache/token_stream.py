"""The token stream of a cache: all of its tokens as one long array with random access.

Shape letters: N reads, T tokens of one read, F bytes of a file.
"""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.cache.checksums import BlockSums, CheckedItems, Sliceable
from lm_trainer.data.cache.documents import read_lengths, read_required_record, read_rows
from lm_trainer.data.cache.format import damage_error, part_key
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_location import TokenLocation

MAX_OPEN_PARTS = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 64), 4096)
"""Maximum number of memory-mapped parts. Each holds a file descriptor, and a process has a limited number of them."""

_FETCH_BYTES = 64 << 20
"""Number of bytes in blocks that are fetched together from object storage for verification."""
_MAX_REQUESTS = 32
"""Maximum number of concurrent requests for commit records in object storage."""


Item = TypeVar("Item")


class TokenStream:
    """All documents in order, each of which ends with EOS. Safe to read from several threads.

    All data are verified against their checksums, which are part of the data fingerprint.
    """

    _kind: ClassVar[str] = "bin"
    """Kind of the file to read from each part."""

    def __init__(self, store: KvStore, ledger: Ledger, dtype: np.dtype):
        self._store, self._dtype = store, dtype
        self._maps: OrderedDict[int, CheckedItems] = OrderedDict()
        self._sums: dict[int, BlockSums] = {}
        self._lock = threading.Lock()
        self.loss_mask: TokenStream | None = None
        """The mask values at the same positions, if the data format has a loss mask. See `loss_mask.py`."""
        self.num_model_ids: int | None = None
        """Number of ids with a row in the model's embedding, if the tokenizer has more. Reads of any other id fail."""
        self.extend(ledger)

    def extend(self, ledger: Ledger) -> None:
        """Adds newly written parts. Reads may run concurrently, as existing parts keep their positions."""
        # The mask is extended first, because a reader of a new token also reads its mask value.
        if self.loss_mask is not None:
            self.loss_mask.extend(ledger)
        counts = self._num_items_per_part(ledger)
        ends = np.cumsum(counts)
        self._ledger, self._names, self._starts = ledger, ledger.parts, ends - counts
        # Masks are always stored in the cache itself.
        self._places = ledger.places if self._kind == "bin" else []
        # Updated last, because readers use the ends to find the length of the stream without a lock.
        self._ends = ends

    def _num_items_per_part(self, ledger: Ledger) -> np.ndarray:
        """Returns the number of items of each part: int64."""
        return np.asarray(ledger.tokens, np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts_N: np.ndarray, length: int, fill: int = 0, out: np.ndarray | None = None) -> np.ndarray:
        """Reads `length` tokens from each start position.

        Args:
            starts_N: int [N], each in [0, len(self)).
            length: T.
            fill: value for positions past the end of the stream.
            out: int32 [N, T], contiguous; None allocates a new array.

        Returns:
            int32 [N, T].

        Raises:
            MachineError: if a part is missing or truncated.
        """
        starts_N = np.asarray(starts_N, np.int64)
        tokens_NT = np.empty((len(starts_N), length), np.int32) if out is None else out
        counts_N = np.minimum(len(self) - starts_N, length)
        for row in np.flatnonzero(counts_N < length):
            tokens_NT[row] = fill
        self.copy(starts_N, counts_N, tokens_NT.reshape(-1), np.arange(len(starts_N)) * length)
        return tokens_NT

    def copy(self, starts_N: np.ndarray, counts_N: np.ndarray, out: np.ndarray, out_starts_N: np.ndarray) -> None:
        """Copies runs of tokens into an array.

        Args:
            starts_N: int64 [N], the first token of each run, in [0, len(self)).
            counts_N: int64 [N], number of tokens of each run; no run reaches beyond the end of the stream.
            out: one-dimensional array to write to.
            out_starts_N: int [N], the index in `out` of each run's first token.

        Raises:
            MachineError: if a part is missing, truncated or damaged.
            UserError: if the model's embedding has no row for an id.
        """
        pieces = self._split_runs(starts_N, counts_N, out_starts_N)
        if self._store.local is None and not self._places:
            self._copy_remote(pieces, out)
        else:
            self._copy_local(pieces, out)
        if self.num_model_ids is not None:
            self._check_ids(pieces, out, self.num_model_ids)

    def _copy_local(self, pieces: list[tuple[int, int, int, int]], out: np.ndarray) -> None:
        parts = {part for _, part, _, _ in pieces}
        # One lookup per part instead of one per piece. Beyond the limit of open files, the maps cannot all be kept
        # open, so each piece looks up its own map.
        few = len(parts) <= MAX_OPEN_PARTS
        map_of = {part: self._open_map(part).fastest_view() for part in parts}.__getitem__ if few else self._open_map
        for position, part, offset, count in pieces:
            out[position : position + count] = map_of(part)[offset : offset + count]

    def _check_ids(self, pieces: list[tuple[int, int, int, int]], out: np.ndarray, num_model_ids: int) -> None:
        for position, part, offset, count in pieces:
            unknown = np.flatnonzero(out[position : position + count] >= num_model_ids)
            if not len(unknown):
                continue
            pieces_P = np.cumsum(read_lengths(self._store, self._ledger, part))
            index = int(np.searchsorted(pieces_P, offset + int(unknown[0]), side="right"))
            row, shard = read_rows(self._store, self._ledger, part)[index], self._names[part].partition("-")[0]
            raise UserError(
                f"{self._store.url}: row {row} of shard {int(shard)} has the token {out[position + int(unknown[0])]}, "
                f"but the model knows 0 to {num_model_ids - 1}; leave the row out, or take the text of that token out "
                "of it"
            )

    def read_from(self, start: int) -> np.ndarray:
        """Reads all tokens from `start` to the end: int32."""
        tokens = np.empty(len(self) - start, np.int32)
        if len(tokens):
            self.copy(np.array([start]), np.array([len(tokens)]), tokens, np.array([0]))
        return tokens

    def _split_runs(
        self, starts_N: np.ndarray, counts_N: np.ndarray, out_starts_N: np.ndarray
    ) -> list[tuple[int, int, int, int]]:
        """Returns (position, part, offset in the part, count) of each piece. A run that crosses parts has several."""
        # Nearly all runs are within one part, so this case is vectorised. The loop handles the others.
        parts_N = np.searchsorted(self._ends, starts_N, side="right")
        offsets_N = starts_N - self._starts[parts_N]
        remaining_N = counts_N - np.minimum(counts_N, self._ends[parts_N] - starts_N)
        firsts_N = counts_N - remaining_N
        pieces = list(zip(out_starts_N.tolist(), parts_N.tolist(), offsets_N.tolist(), firsts_N.tolist(), strict=True))
        for run in np.flatnonzero(remaining_N).tolist():
            position, part, remaining = (
                int(out_starts_N[run] + firsts_N[run]),
                int(parts_N[run]) + 1,
                int(remaining_N[run]),
            )
            while remaining:
                count = min(remaining, int(self._ends[part] - self._starts[part]))
                pieces.append((position, part, 0, count))
                position, part, remaining = position + count, part + 1, remaining - count
        return pieces

    def _byte_range(self, start: int, count: int) -> tuple[int, int]:
        """Returns the range [first, last) of a part file's bytes with the `count` tokens that start at `start`."""
        size = self._dtype.itemsize
        return start * size, (start + count) * size

    def _decode(self, content: bytes, start: int, count: int) -> np.ndarray:
        """Decodes the bytes in the range returned by `_byte_range`."""
        del start, count
        return np.frombuffer(content, self._dtype)

    def _view_items(self, content_F: np.ndarray) -> Sliceable:
        """Returns a view of a file's bytes as an array with one item per token."""
        return content_F.view(self._dtype)

    def _block_sums(self, part: int) -> BlockSums:
        """Returns the checksums of a part, which are kept in memory so that each block is verified only once."""
        if part not in self._sums:
            record, name = read_required_record(self._store, self._ledger, part), self._names[part]
            recorded = record["place"] if self._places else record["blobs"][self._kind]
            try:
                self._sums[part] = BlockSums(recorded, self._file_bytes(part))
            except (ValueError, KeyError, TypeError):
                raise damage_error(self._store, part_key(name, "json")) from None
        return self._sums[part]

    def _file_bytes(self, part: int) -> int:
        count = int(self._ends[part] - self._starts[part])
        if self._places:
            return count * np.dtype(TokenLocation(*self._places[part]).dtype).itemsize
        return self._byte_range(0, count)[1]

    def _damage_error(self, part: int, first: int) -> MachineError:
        """Returns the error for a damaged block that begins at byte `first` of a part."""
        if self._places:
            path = TokenLocation(*self._places[part]).path
            return MachineError(
                f"{path} has changed since it was indexed; put it back as it was, or remove {self._store.url} to index "
                "it again"
            )
        problem = f"has changed since it was written, near byte {first}"
        return damage_error(self._store, part_key(self._names[part], self._kind), problem)

    def _open_map(self, part: int) -> CheckedItems:
        """Returns the memory map of a part, opening it on demand.

        Beyond the limit, closes the least recently used map.
        """
        with self._lock:
            if part in self._maps:
                self._maps.move_to_end(part)
                return self._maps[part]
            tokens = self._maps[part] = self._open(part)
            if len(self._maps) > MAX_OPEN_PARTS:
                self._maps.popitem(last=False)
            return tokens

    def _open(self, part: int) -> CheckedItems:
        sums, failed = self._block_sums(part), partial(self._damage_error, part)
        if self._places:
            position, count = TokenLocation(*self._places[part]), int(self._ends[part] - self._starts[part])
            items = position.open(count)
            return CheckedItems(items, position.view_bytes(items), position.byte_range, sums, failed)
        content_F = self._map_file(part)
        return CheckedItems(self._view_items(content_F), content_F, self._byte_range, sums, failed)

    def _map_file(self, part: int) -> np.ndarray:
        """Maps the bytes of a part's file into memory: uint8 [F]."""
        assert self._store.local is not None
        path = self._store.local / part_key(self._names[part], self._kind)
        written = self._file_bytes(part)
        try:
            size = path.stat().st_size
            if size == written:
                # A plain array, as slices of a memmap object are ten times as slow. An empty file cannot be mapped.
                return np.asarray(np.memmap(path, np.uint8, "r")) if written else np.zeros(0, np.uint8)
        except OSError as error:
            raise MachineError(
                f"the cache has lost a part: {error}. Remove {self._store.url} to build it again"
            ) from None
        raise MachineError(
            f"{path} has {size} bytes, but {written} were written; remove {self._store.url} to build it again"
        )

    def _copy_remote(self, pieces: list[tuple[int, int, int, int]], out: np.ndarray) -> None:
        if unknown := {part for _, part, _, _ in pieces} - self._sums.keys():
            with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
                list(pool.map(self._block_sums, sorted(unknown)))
        # Every fetch is verified, because data that arrived intact may arrive damaged the next time.
        for group in _group_by_bytes(
            pieces, lambda piece: self._num_block_bytes(piece[1], *self._byte_range(*piece[2:]))
        ):
            ranges = [(part, *self._byte_range(offset, count)) for _, part, offset, count in group]
            for (position, _, offset, count), content in zip(group, self._fetch_verified(ranges), strict=True):
                out[position : position + count] = self._decode(content, offset, count)

    def _num_block_bytes(self, part: int, first: int, last: int) -> int:
        blocks = self._sums[part].blocks_in_range(first, last)
        return (
            self._sums[part].block_byte_range(blocks[-1])[1] - self._sums[part].block_byte_range(blocks[0])[0]
            if blocks
            else 0
        )

    def _fetch_verified(self, ranges: list[tuple[int, int, int]]) -> list[bytes]:
        """Fetches and verifies blocks, and returns the bytes of each (part, first byte, last byte)."""
        # A part by an earlier version has a single checksum, so verifying each fetch would need the full file. It is
        # verified only once.
        blocks: dict[tuple[int, int], tuple[int, int]] = {}
        for part, first, last in ranges:
            sums = self._sums[part]
            needed = sums.unverified_blocks(first, last) if sums.one_sum else sums.blocks_in_range(first, last)
            blocks |= {(part, block): sums.block_byte_range(block) for block in needed}
        contents = self._fetch_blocks(blocks)
        compared_once = self._fetch([piece for piece in ranges if self._sums[piece[0]].one_sum])
        return [
            next(compared_once) if self._sums[part].one_sum else self._join_blocks(contents, part, first, last)
            for part, first, last in ranges
        ]

    def _join_blocks(self, contents: Mapping[tuple[int, int], bytes], part: int, first: int, last: int) -> bytes:
        blocks = self._sums[part].blocks_in_range(first, last)
        begin = self._sums[part].block_byte_range(blocks.start)[0]
        return b"".join(contents[part, block] for block in blocks)[first - begin : last - begin]

    def _fetch_blocks(self, blocks: Mapping[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Fetches blocks, given as (part, number) and their byte ranges. A damaged block is fetched a second time."""
        contents: dict[tuple[int, int], bytes] = {}
        for _ in range(2):
            missing = [block for block in blocks if block not in contents]
            fetched = self._fetch([(part, *blocks[part, block]) for part, block in missing])
            contents |= {
                (part, block): content
                for (part, block), content in zip(missing, fetched, strict=True)
                if self._sums[part].verify_block(block, content)
            }
        for part, block in blocks:
            if (part, block) not in contents:
                raise self._damage_error(part, blocks[part, block][0])
        return contents

    def _fetch(self, ranges: list[tuple[int, int, int]]) -> Iterator[bytes]:
        """Yields the bytes of each (part, first byte, last byte) from object storage."""
        keys = [part_key(self._names[part], self._kind) for part, _, _ in ranges]
        contents = self._store.read_ranges([(key, *piece[1:]) for key, piece in zip(keys, ranges, strict=True)])
        for (part, first, last), content in zip(ranges, contents, strict=True):
            if len(content) != last - first:
                raise MachineError(f"the cache {self._store.url} has lost part of {self._names[part]}; build it again")
            yield content


def _group_by_bytes(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups items so that each list has at most about `_FETCH_BYTES` bytes."""
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + size_of(item) > _FETCH_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += size_of(item)
    if group:
        yield group
