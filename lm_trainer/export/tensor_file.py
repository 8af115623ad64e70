"""Reads the header of a safetensors file, and regions of its tensors on demand.

Files written here have a checksum of every tensor, which is compared at its first read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lm_trainer.core.errors import MachineError, UserError

Region = tuple[slice, ...]
"""A slice with start and stop for each dimension."""

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


_EXPONENTS = {
    _DTYPES["F32"]: np.uint32(0x7F800000),
    _DTYPES["F16"]: np.uint16(0x7C00),
    _DTYPES["BF16"]: np.uint16(0x7F80),
}
"""Mask of the exponent bits of each dtype."""

_CHECKED_AT_ONCE = 1 << 16

CHECKSUMS = "crc32"
"""Key of a file's metadata with the CRC-32 of the bytes of each tensor, as 8 hexadecimal digits, in the order of the
names of the tensors."""
_DIGITS = 8
_SUMMED_BYTES = 16 << 20
"""Number of bytes that are read at a time for a checksum."""


def compute_checksums(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns the value of `CHECKSUMS` for the tensors of a file, which must be contiguous."""
    contents = (tensors[name].reshape(-1).view(np.uint8) for name in sorted(tensors))
    return "".join(f"{zlib.crc32(content_N.data):0{_DIGITS}x}" for content_N in contents)


def order_metadata(path: Path) -> None:
    """Sorts the metadata in the header of a file, which safetensors writes in random order, so that equal tensors give
    equal bytes.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) <= size
        file.seek(8)
        # The format pads a header with spaces.
        file.write(content.ljust(size))


@dataclass
class TensorChecksum:
    """The checksum of a tensor in a file."""

    crc32: int
    is_verified: bool = False
    """True once the tensor was compared."""


class StoredTensor(NamedTuple):
    """A tensor in a file. Its data is not in memory."""

    name: str
    file: Path
    dtype: str
    """Dtype name in safetensors: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the first byte of the tensor in the file."""
    checksum: TensorChecksum | None = None
    """None for a file of another program."""

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy dtype.

        Raises:
            UserError: for a dtype that no parameter can represent exactly.
        """
        if self.dtype == "F64":
            raise UserError(f"{self.file}: {self.name} is float64, which float32 cannot hold; save it as float32")
        if self.dtype not in _DTYPES:
            raise UserError(f"{self.file}: {self.name} is quantized ({self.dtype}); use f32, f16, bf16")
        return _DTYPES[self.dtype]

    def read(self, region: Region = ()) -> np.ndarray:
        """Copies a region of the tensor, by default all of it, in the dtype of the file. No other part of the file
        stays in memory.

        Raises:
            UserError: for the same reasons as in `numpy_dtype`, and for NaN and infinite values.
            MachineError: if the file has become unreadable, or was damaged.
        """
        dtype = self.numpy_dtype
        # A memory map cannot be empty.
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)[region]
        try:
            mapped = np.memmap(self.file, dtype, "r", self.offset, self.shape)
        except (OSError, ValueError) as error:
            raise MachineError(f"{self.file}: cannot be read any more ({error})") from None
        self._verify(mapped.nbytes)
        # A copy, so that the pages of the file are released together with the map.
        values = np.array(mapped[region])
        if not is_finite(values):
            raise UserError(f"{self.file}: {self.name} holds NaN or infinite values; use a sound copy of it")
        return values

    def _verify(self, size: int) -> None:
        """Compares the tensor with its checksum, unless it was compared before."""
        if self.checksum is None or self.checksum.is_verified:
            return
        crc = 0
        # Read, not mapped, so that the pages of a large tensor do not stay in memory.
        with self.file.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, size, _SUMMED_BYTES):
                crc = zlib.crc32(file.read(min(_SUMMED_BYTES, size - start)), crc)
        if crc != self.checksum.crc32:
            raise MachineError(
                f"{self.file}: {self.name} has changed since it was written; put back a copy, or export it again (if "
                f"a program has changed it on purpose, let it save the file without `{CHECKSUMS}` in its metadata)"
            )
        self.checksum.is_verified = True


def is_finite(values: np.ndarray) -> bool:
    """Returns True if no value is NaN or infinite. Needs memory only for one block of values."""
    mask = _EXPONENTS.get(values.dtype)
    if mask is None:
        return True
    # An array in the file's layout is flattened without a copy; a region with gaps was copied when it was read.
    bits_N = values.reshape(-1).view(mask.dtype)
    # NaN and infinity are the values whose exponent bits are all ones. A block fits into the cache of a core.
    return all(
        (np.bitwise_and(bits_N[start : start + _CHECKED_AT_ONCE], mask) != mask).all()
        for start in range(0, len(bits_N), _CHECKED_AT_ONCE)
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads the header of a safetensors file and returns its tensors by name.

    Raises:
        FileNotFoundError: if the file does not exist.
        UserError: if the file is damaged: truncated, not safetensors, or with tensors that overlap, leave gaps or are
            listed twice.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # The safetensors package checks the full header against the size of the file.
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_refuse_duplicate_keys)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged, or not a safetensors file ({error})") from None
    # The file begins with the length of the header in 8 bytes. Offsets count from the end of the header.
    start = 8 + length
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    sums = _parse_checksums((header.get("__metadata__") or {}).get(CHECKSUMS), sorted(entries))
    return {
        name: StoredTensor(
            name, path, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0], sums.get(name)
        )
        for name, entry in entries.items()
    }


def _parse_checksums(text: str | None, names: Sequence[str]) -> dict[str, TensorChecksum]:
    """Returns the checksum of each tensor. Returns none if another program has added or removed tensors."""
    if text is None or len(text) != _DIGITS * len(names):
        return {}
    try:
        values = [int(text[start : start + _DIGITS], 16) for start in range(0, len(text), _DIGITS)]
    except ValueError:
        return {}
    return {name: TensorChecksum(value) for name, value in zip(names, values, strict=True)}


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object and refuses duplicate keys. Python would silently use the last value of such a key."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is listed twice")
    return entries
