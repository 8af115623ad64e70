"""The tokens of a finished cache as one long array, read at any place.

Shape letters: N reads, T tokens of one read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import tensorstore as ts

from lm_trainer.core.errors import MachineError
from lm_trainer.data.layout import Ledger, part_key
from lm_trainer.data.store import Store

MAX_OPEN_PARTS = 256
"""Each memory-mapped part holds a file descriptor."""


class TokenStream:
    """All documents one after another, each ended by EOS. Safe to read from several threads."""

    def __init__(self, store: Store, ledger: Ledger, dtype: np.dtype):
        self._store, self._names, self._dtype = store, ledger.parts, dtype
        self._ends = np.cumsum(np.asarray(ledger.tokens, np.int64))
        self._starts = self._ends - np.asarray(ledger.tokens, np.int64)
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts_N: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
        """Reads `length` tokens from each start.

        Args:
            starts_N: int [N], each in [0, len(self)).
            length: T.
            fill: stands where the stream has ended.

        Returns:
            int32 [N, T].

        Raises:
            MachineError: if a part is missing or was cut short.
        """
        pieces = self._pieces(starts_N, length)
        tokens_NT = np.empty((len(starts_N), length), np.int32)
        for row in np.flatnonzero(starts_N + length > len(self)):
            tokens_NT[row] = fill
        if self._store.local is None:
            self._read_remote(pieces, tokens_NT)
        else:
            maps = {part: self._map(part) for part in {piece[2] for piece in pieces}}
            for row, column, part, offset, count in pieces:
                tokens_NT[row, column : column + count] = maps[part][offset : offset + count]
        return tokens_NT

    def _pieces(self, starts_N: np.ndarray, length: int) -> list[tuple[int, int, int, int, int]]:
        """(row, column, part, offset in the part, count): a read that crosses parts has several."""
        parts_N = np.searchsorted(self._ends, starts_N, side="right")
        offsets_N = starts_N - self._starts[parts_N]
        rests_N = self._ends[parts_N] - starts_N
        pieces = []
        for row, (part, offset, rest) in enumerate(
            zip(parts_N.tolist(), offsets_N.tolist(), rests_N.tolist(), strict=True)
        ):
            count = min(length, rest)
            pieces.append((row, 0, part, offset, count))
            column = count
            while column < length and part + 1 < len(self._names):
                part += 1
                count = min(length - column, int(self._ends[part] - self._starts[part]))
                pieces.append((row, column, part, 0, count))
                column += count
        return pieces

    def _map(self, part: int) -> np.ndarray:
        with self._lock:
            if part in self._maps:
                self._maps.move_to_end(part)
                return self._maps[part]
            tokens = self._maps[part] = self._open(part)
            if len(self._maps) > MAX_OPEN_PARTS:
                self._maps.popitem(last=False)
            return tokens

    def _open(self, part: int) -> np.ndarray:
        assert self._store.local is not None
        path = self._store.local / part_key(self._names[part], "bin")
        count = int(self._ends[part] - self._starts[part])
        try:
            size = path.stat().st_size
            if size == count * self._dtype.itemsize:
                # A plain array: slices of a memmap object cost ten times as much.
                return np.asarray(np.memmap(path, self._dtype, "r")) if count else np.zeros(0, self._dtype)
        except OSError as error:
            raise MachineError(
                f"the cache has lost a part: {error}. Remove {self._store.url} to build it again"
            ) from None
        raise MachineError(
            f"{path} has {size} bytes, but {count * self._dtype.itemsize} were written; "
            f"remove {self._store.url} to build it again"
        )

    def _read_remote(self, pieces: list[tuple[int, int, int, int, int]], tokens_NT: np.ndarray) -> None:
        size = self._dtype.itemsize
        with ts.Batch() as batch:
            futures = [
                self._store.read_range(
                    part_key(self._names[part], "bin"), offset * size, (offset + count) * size, batch
                )
                for _, _, part, offset, count in pieces
            ]
        for (row, column, part, _, count), future in zip(pieces, futures, strict=True):
            try:
                value = future.result().value
            except (ValueError, OSError) as error:
                raise MachineError(f"cannot read {self._store.url}/parts/{self._names[part]}.bin: {error}") from None
            if len(value) != count * size:
                raise MachineError(f"the cache {self._store.url} has lost part of {self._names[part]}; build it again")
            tokens_NT[row, column : column + count] = np.frombuffer(value, self._dtype)
