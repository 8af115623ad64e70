"""Token stream of a cache: all its tokens as one long array, read at any place.

Shape letters: N reads, T tokens of one read.
"""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorstore as ts

from lm_trainer.core.bucket import reason_of
from lm_trainer.core.errors import MachineError
from lm_trainer.data.cache.format import part_key
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_place import TokenPlace

MAX_OPEN_PARTS = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 64), 4096)
"""Each memory-mapped part holds a file descriptor, of which a process may have only so many."""


class TokenStream:
    """All documents one after another, each ended by EOS. Safe to read from several threads."""

    _kind: ClassVar[str] = "bin"
    """The file of each part that is read."""

    def __init__(self, store: KvStore, ledger: Ledger, dtype: np.dtype):
        self._store, self._dtype = store, dtype
        self._maps: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.loss_mask: TokenStream | None = None
        """The mask values at the same places, where the data format has a loss mask: see `loss_mask.py`."""
        self.extend(ledger)

    def extend(self, ledger: Ledger) -> None:
        """Takes in the parts that were written since, while others read; those that were there keep their places."""
        # The mask first: whoever finds a token there reads its mask value as well.
        if self.loss_mask is not None:
            self.loss_mask.extend(ledger)
        counts = self._counts(ledger)
        ends = np.cumsum(counts)
        self._names, self._starts = ledger.parts, ends - counts
        # Masks always lie in the cache.
        self._places = ledger.places if self._kind == "bin" else []
        # The last to change: readers know by the ends how far the stream goes, and hold no lock.
        self._ends = ends

    def _counts(self, ledger: Ledger) -> np.ndarray:
        """The items of each part, int64."""
        return np.asarray(ledger.tokens, np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts_N: np.ndarray, length: int, fill: int = 0, out: np.ndarray | None = None) -> np.ndarray:
        """Reads `length` tokens from each start.

        Args:
            starts_N: int [N], each in [0, len(self)).
            length: T.
            fill: the value where the stream has ended.
            out: int32 [N, T], contiguous; a new array, if None.

        Returns:
            int32 [N, T].

        Raises:
            MachineError: if a part is missing or was cut short.
        """
        starts_N = np.asarray(starts_N, np.int64)
        tokens_NT = np.empty((len(starts_N), length), np.int32) if out is None else out
        counts_N = np.minimum(len(self) - starts_N, length)
        for row in np.flatnonzero(counts_N < length):
            tokens_NT[row] = fill
        self.copy(starts_N, counts_N, tokens_NT.reshape(-1), np.arange(len(starts_N)) * length)
        return tokens_NT

    def copy(self, starts_N: np.ndarray, counts_N: np.ndarray, out: np.ndarray, places_N: np.ndarray) -> None:
        """Copies runs of tokens to places of an array.

        Args:
            starts_N: int64 [N], the first token of each run, in [0, len(self)).
            counts_N: int64 [N], tokens of each run; none reaches beyond the end.
            out: one-dimensional.
            places_N: int [N], the index in `out` at which each run begins.

        Raises:
            MachineError: if a part is missing or was cut short.
        """
        pieces = self._pieces(starts_N, counts_N, places_N)
        if self._store.local is None and not self._places:
            self._copy_remote(pieces, out)
            return
        parts = {part for _, part, _, _ in pieces}
        # Each part is looked up once, not once a piece. Beyond the limit of open files the maps cannot all be held, and
        # each piece asks for its own.
        map_of = {part: self._map(part) for part in parts}.__getitem__ if len(parts) <= MAX_OPEN_PARTS else self._map
        for place, part, offset, count in pieces:
            out[place : place + count] = map_of(part)[offset : offset + count]

    def tail(self, start: int) -> np.ndarray:
        """Reads all tokens from `start` on: int32."""
        tokens = np.empty(len(self) - start, np.int32)
        if len(tokens):
            self.copy(np.array([start]), np.array([len(tokens)]), tokens, np.array([0]))
        return tokens

    def _pieces(
        self, starts_N: np.ndarray, counts_N: np.ndarray, places_N: np.ndarray
    ) -> list[tuple[int, int, int, int]]:
        """Returns (place, part, offset in the part, count) for each run; a run that crosses parts has several."""
        # Nearly all runs lie in one part, so that is computed for all at once; the loop is for the rest.
        parts_N = np.searchsorted(self._ends, starts_N, side="right")
        offsets_N = starts_N - self._starts[parts_N]
        rests_N = counts_N - np.minimum(counts_N, self._ends[parts_N] - starts_N)
        firsts_N = counts_N - rests_N
        pieces = list(zip(places_N.tolist(), parts_N.tolist(), offsets_N.tolist(), firsts_N.tolist(), strict=True))
        for run in np.flatnonzero(rests_N).tolist():
            place, part, rest = int(places_N[run] + firsts_N[run]), int(parts_N[run]) + 1, int(rests_N[run])
            while rest:
                count = min(rest, int(self._ends[part] - self._starts[part]))
                pieces.append((place, part, 0, count))
                place, part, rest = place + count, part + 1, rest - count
        return pieces

    def _byte_range(self, start: int, count: int) -> tuple[int, int]:
        """Returns the bytes [first, last) of a part's file that hold `count` tokens from `start` on."""
        size = self._dtype.itemsize
        return start * size, (start + count) * size

    def _decode(self, content: bytes, start: int, count: int) -> np.ndarray:
        """Decodes the bytes of `_byte_range`."""
        del start, count
        return np.frombuffer(content, self._dtype)

    def _map_file(self, path: Path) -> Any:
        """Returns the file as an array of one item for each token."""
        # A plain array: slices of a memmap object cost ten times as much.
        return np.asarray(np.memmap(path, self._dtype, "r"))

    def _map(self, part: int) -> Any:
        """Returns the memory map of a part, opened if need be; the one used longest ago is closed beyond the limit."""
        with self._lock:
            if part in self._maps:
                self._maps.move_to_end(part)
                return self._maps[part]
            tokens = self._maps[part] = self._open(part)
            if len(self._maps) > MAX_OPEN_PARTS:
                self._maps.popitem(last=False)
            return tokens

    def _open(self, part: int) -> Any:
        if self._places:
            return TokenPlace(*self._places[part]).open(int(self._ends[part] - self._starts[part]))
        assert self._store.local is not None
        path = self._store.local / part_key(self._names[part], self._kind)
        count = int(self._ends[part] - self._starts[part])
        written = self._byte_range(0, count)[1]
        try:
            size = path.stat().st_size
            if size == written:
                # An empty file cannot be memory-mapped.
                return self._map_file(path) if count else np.zeros(0, self._dtype)
        except OSError as error:
            raise MachineError(
                f"the cache has lost a part: {error}. Remove {self._store.url} to build it again"
            ) from None
        raise MachineError(
            f"{path} has {size} bytes, but {written} were written; remove {self._store.url} to build it again"
        )

    def _copy_remote(self, pieces: list[tuple[int, int, int, int]], out: np.ndarray) -> None:
        ranges = [self._byte_range(offset, count) for _, _, offset, count in pieces]
        keys = [part_key(self._names[part], self._kind) for _, part, _, _ in pieces]
        # TensorStore joins the ranges of one batch that lie close together, and asks for them at the same time.
        with ts.Batch() as batch:
            futures = [
                self._store.read_range(key, first, last, batch) for key, (first, last) in zip(keys, ranges, strict=True)
            ]
        for (place, part, offset, count), key, (first, last), future in zip(pieces, keys, ranges, futures, strict=True):
            try:
                content = future.result().value
            except (ValueError, OSError) as error:
                raise MachineError(f"cannot read {self._store.url}/{key}: {reason_of(error)}") from None
            if len(content) != last - first:
                raise MachineError(f"the cache {self._store.url} has lost part of {self._names[part]}; build it again")
            out[place : place + count] = self._decode(content, offset, count)
