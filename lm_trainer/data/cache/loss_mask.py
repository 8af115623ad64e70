"""Marks of tokens, kept beside them where a format makes any: which are learnt, and which end a document.

Shape letters: D documents, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from lm_trainer.core.errors import MachineError
from lm_trainer.data.cache.format import part_key
from lm_trainer.data.cache.kvstore import reason_of
from lm_trainer.data.cache.token_stream import TokenStream

LEARN, END = 1, 2
"""The two bits of a mark. With marks, END alone ends a document: EOS may also stand inside one."""

_PER_BYTE = 4


def pack_marks(learn_T: np.ndarray, lengths_D: np.ndarray) -> bytes:
    """The mask file of a part: two bits for each token, the first token in the lowest bits.

    Args:
        learn_T: bool [T], the tokens to learn.
        lengths_D: int [D], tokens of each document, none of which is empty.
    """
    marks = np.zeros(-(-len(learn_T) // _PER_BYTE) * _PER_BYTE, np.uint8)
    marks[: len(learn_T)] = learn_T * np.uint8(LEARN)
    marks[np.cumsum(lengths_D) - 1] |= END
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    return np.bitwise_or.reduce(marks.reshape(-1, _PER_BYTE) << shifts, axis=1).astype(np.uint8).tobytes()


def mask_bytes(start: int, count: int) -> tuple[int, int]:
    """The bytes [first, last) of a mask file that hold the marks of `count` tokens from `start` on."""
    return start // _PER_BYTE, -(-(start + count) // _PER_BYTE)


def unpack_marks(content: Any, start: int, count: int) -> np.ndarray:
    """The marks of `count` tokens: uint8 [T], each a sum of LEARN and END.

    Args:
        content: uint8, the mask file from the byte of token `start` on.
        start: the number of the first token in the part.
        count: T.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    skipped = start % _PER_BYTE
    used = np.asarray(content[: -(-(skipped + count) // _PER_BYTE)], np.uint8)
    return ((used[:, None] >> shifts) & np.uint8(LEARN | END)).reshape(-1)[skipped : skipped + count]


class MarkStream(TokenStream):
    """The marks of a stream, read at the same places as its tokens; each is a sum of LEARN and END."""

    def _open(self, part: int) -> Any:
        assert self._store.local is not None
        path = self._store.local / part_key(self._names[part], "msk")
        size = mask_bytes(0, int(self._ends[part] - self._starts[part]))[1]
        try:
            found = path.stat().st_size
            if found == size:
                return _PackedMarks(np.asarray(np.memmap(path, np.uint8, "r")) if size else np.zeros(0, np.uint8))
        except OSError as error:
            raise MachineError(
                f"the cache has lost a part: {error}. Remove {self._store.url} to build it again"
            ) from None
        raise MachineError(
            f"{path} has {found} bytes, but {size} were written; remove {self._store.url} to build it again"
        )

    def _copy_remote(self, pieces: list[tuple[int, int, int, int]], out: np.ndarray) -> None:
        with ts.Batch() as batch:
            futures = [
                self._store.read_range(part_key(self._names[part], "msk"), *mask_bytes(offset, count), batch)
                for _, part, offset, count in pieces
            ]
        for (place, part, offset, count), future in zip(pieces, futures, strict=True):
            try:
                content = np.frombuffer(future.result().value, np.uint8)
            except (ValueError, OSError) as error:
                raise MachineError(
                    f"cannot read {self._store.url}/parts/{self._names[part]}.msk: {reason_of(error)}"
                ) from None
            marks = unpack_marks(content, offset, count)
            if len(marks) != count:
                raise MachineError(f"the cache {self._store.url} has lost part of {self._names[part]}; build it again")
            out[place : place + count] = marks


class _PackedMarks:
    """A mask file that is sliced as if it held one mark for each token."""

    def __init__(self, content: np.ndarray):
        self._content = content

    def __getitem__(self, tokens: slice) -> np.ndarray:
        first, last = mask_bytes(tokens.start, tokens.stop - tokens.start)
        return unpack_marks(self._content[first:last], tokens.start, tokens.stop - tokens.start)
