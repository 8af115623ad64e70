"""Tokens of a part that stay in a user's file and are only indexed by the cache."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm_trainer.core.errors import MachineError
from lm_trainer.core.key_values import plain_error_text
from lm_trainer.data.cache.checksums import Sliceable

if TYPE_CHECKING:
    import tensorstore as ts

_CACHE_BYTES = 256 << 20
"""Memory in bytes for decoded chunks of compressed arrays. Neighbouring rows are in the same chunk."""


class TokenLocation(NamedTuple):
    """Location of tokens in a file or array, as stored in the commit record of a part."""

    path: str
    kind: str
    """`raw` for a memory-mapped file of ids; `zarr3` or `zarr` for an array that is read with TensorStore."""
    dtype: str
    """NumPy dtype name of the ids."""
    header: int
    """Number of bytes before the first id of the file."""
    first: int
    """Index of the part's first id within the file."""

    def open(self, count: int) -> Sliceable:
        """Returns `count` ids as a sliceable array.

        Raises:
            MachineError: if the file is missing or truncated.
        """
        try:
            if self.kind != "raw":
                return _TokenSlices(_open_array(self.path, self.kind), self.first)
            dtype = np.dtype(self.dtype)
            offset = self.header + self.first * dtype.itemsize
            if Path(self.path).stat().st_size >= offset + count * dtype.itemsize:
                # A plain array, because slices of a memmap object are ten times as slow.
                return np.asarray(np.memmap(self.path, dtype, "r", offset, (count,)))
        except (OSError, ValueError) as error:
            raise MachineError(f"cannot read the tokens in {self.path}: {plain_error_text(error)}") from None
        raise MachineError(f"{self.path} was cut short since it was indexed; put it back, or build the cache again")

    def byte_range(self, start: int, count: int) -> tuple[int, int]:
        """Returns the range [first, last) of the bytes of `count` ids, counted from the first id of the part."""
        size = np.dtype(self.dtype).itemsize
        return start * size, (start + count) * size

    def view_bytes(self, ids: Sliceable) -> Sliceable:
        """Returns the result of `open` as an array that is sliced by bytes. Bounds must be multiples of the id size."""
        return ids.view(np.uint8) if isinstance(ids, np.ndarray) else _ByteView(ids, np.dtype(self.dtype).itemsize)


class _TokenSlices:
    """A TensorStore array that is indexed relative to `first` and returns its slices as NumPy arrays."""

    def __init__(self, array: ts.TensorStore, first: int):
        self._array, self._first = array, first

    def __getitem__(self, tokens: slice) -> np.ndarray:
        try:
            return self._array[self._first + tokens.start : self._first + tokens.stop].read().result()
        except (ValueError, OSError) as error:
            raise MachineError(f"cannot read the tokens in {self._array.spec()}: {plain_error_text(error)}") from None


class _ByteView:
    """The bytes of another array's items."""

    def __init__(self, items: Sliceable, itemsize: int):
        self._items, self._itemsize = items, itemsize

    def __getitem__(self, content: slice) -> np.ndarray:
        ids = self._items[content.start // self._itemsize : content.stop // self._itemsize]
        return np.ascontiguousarray(ids).view(np.uint8)


@lru_cache(maxsize=1)
def _tensorstore_context() -> ts.Context:
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def _open_array(path: str, kind: str) -> ts.TensorStore:
    import tensorstore as ts

    spec = {"driver": kind, "kvstore": {"driver": "file", "path": f"{path}/"}}
    return ts.open(spec, open=True, read=True, context=_tensorstore_context()).result()


def open_array(path: str, kind: str) -> ts.TensorStore:
    """Opens a TensorStore array on this machine.

    Raises:
        MachineError: if the array cannot be read.
    """
    try:
        return _open_array(path, kind)
    except (ValueError, OSError) as error:
        raise MachineError(f"cannot read {path}: {plain_error_text(error)}") from None
