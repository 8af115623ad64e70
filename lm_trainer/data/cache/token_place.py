"""Tokens of a part that stay in a file of the user's, where a cache only indexes them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import MachineError
from lm_trainer.core.key_values import reason_of

if TYPE_CHECKING:
    import tensorstore as ts

_CACHE_BYTES = 256 << 20
"""Decoded chunks of compressed arrays that are kept: neighbouring rows lie in the same ones."""


class TokenPlace(NamedTuple):
    """Tokens in a file or array, as the commit record of a part has it."""

    path: str
    kind: str
    """`raw`: a file of ids, which is memory-mapped; `zarr3` or `zarr`: an array that TensorStore reads."""
    dtype: str
    """Type of the ids, as NumPy writes it."""
    header: int
    """Bytes before the first id of the file."""
    first: int
    """The first id of the part, counted in the file."""

    def open(self, count: int) -> Any:
        """Returns `count` ids as something that can be sliced.

        Raises:
            MachineError: if the file is not there any more, or was cut short.
        """
        try:
            if self.kind != "raw":
                return _Slices(_open_array(self.path, self.kind), self.first)
            dtype = np.dtype(self.dtype)
            offset = self.header + self.first * dtype.itemsize
            if Path(self.path).stat().st_size >= offset + count * dtype.itemsize:
                # A plain array: slices of a memmap object cost ten times as much.
                return np.asarray(np.memmap(self.path, dtype, "r", offset, (count,)))
        except (OSError, ValueError) as error:
            raise MachineError(f"cannot read the tokens in {self.path}: {reason_of(error)}") from None
        raise MachineError(f"{self.path} was cut short since it was indexed; put it back, or build the cache again")

    def byte_range(self, start: int, count: int) -> tuple[int, int]:
        """Returns the bytes [first, last) of `count` ids, counted from the first of the part."""
        size = np.dtype(self.dtype).itemsize
        return start * size, (start + count) * size

    def bytes_of(self, ids: Any) -> Any:
        """Returns what `open` returned as something that is sliced by bytes, as far as these are whole ids."""
        return ids.view(np.uint8) if isinstance(ids, np.ndarray) else _Bytes(ids, np.dtype(self.dtype).itemsize)


class _Slices:
    """An array of TensorStore whose slices are NumPy arrays, counted from one of its items."""

    def __init__(self, array: Any, first: int):
        self._array, self._first = array, first

    def __getitem__(self, tokens: slice) -> np.ndarray:
        try:
            return self._array[self._first + tokens.start : self._first + tokens.stop].read().result()
        except (ValueError, OSError) as error:
            raise MachineError(f"cannot read the tokens in {self._array.spec()}: {reason_of(error)}") from None


class _Bytes:
    """Bytes of the items of another array."""

    def __init__(self, items: _Slices, itemsize: int):
        self._items, self._itemsize = items, itemsize

    def __getitem__(self, content: slice) -> np.ndarray:
        ids = self._items[content.start // self._itemsize : content.stop // self._itemsize]
        return np.ascontiguousarray(ids).view(np.uint8)


@lru_cache(maxsize=1)
def _context() -> ts.Context:
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def _open_array(path: str, kind: str) -> Any:
    import tensorstore as ts

    spec = {"driver": kind, "kvstore": {"driver": "file", "path": f"{path}/"}}
    return ts.open(spec, open=True, read=True, context=_context()).result()


def open_array(path: str, kind: str) -> Any:
    """Opens an array of TensorStore on this machine.

    Raises:
        MachineError: if there is none.
    """
    try:
        return _open_array(path, kind)
    except (ValueError, OSError) as error:
        raise MachineError(f"cannot read {path}: {reason_of(error)}") from None
