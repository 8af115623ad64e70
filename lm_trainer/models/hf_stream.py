"""Reads blocks of parameters: finds the regions of a file's tensors that make up a block of a parameter.

A block is one slice, with start and stop, per dimension of a parameter, or of the part of a parameter that is one
tensor in the file. A region is one slice per dimension of a tensor in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lm_trainer.models.hf_table import FileTensor

Slices = tuple[slice, ...]
ReadRegion = Callable[[str, Slices], np.ndarray]
"""Reads a region of the named tensor in the file."""


class SourceSlice(NamedTuple):
    """One part of a tensor in the file, and its position in the parameter."""

    tensor: str
    """Name of the tensor in the file."""
    entry: FileTensor
    position: int
    """Index of the part within the entry."""

    @property
    def index(self) -> tuple[int, ...]:
        """Indices of the layer and the expert, if the parameter has these axes."""
        return self.entry.parts[self.position].index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.parts[self.position].shape

    @property
    def _merged_dim(self) -> int | None:
        """Dimension of the heads, which the file merges with head_size; None without heads."""
        axes = self.entry.parts[self.position].axes
        return next((dim for dim in range(len(axes) - 1) if axes[dim : dim + 2] in _HEADS), None)

    @property
    def outermost_dim(self) -> int:
        """Dimension here that is outermost in the file, where a block that is thin along it is one contiguous range."""
        axes = self.entry.parts[self.position].axes
        table = self.entry.table
        if not (table.transposed or table.reversed) or axes[0] == "experts":
            return 0
        last = len(self.shape) - 1
        return last - 1 if self._merged_dim == last - 1 else last

    def read(self, block: Slices, read: ReadRegion) -> np.ndarray:
        """Reads a block of this part in the dtype of the file. Loads only the rows and columns that the block needs."""
        merged_dim, interleaved, parts = self._merged_dim, self.entry.table.interleaved, len(self.entry.parts)
        part = self.entry.parts[self.position]
        size = part.head_size if merged_dim is None else self.shape[merged_dim + 1]
        region: list[slice] = []
        for dim, bounds in enumerate(block):
            if merged_dim is not None and dim == merged_dim:
                # Interleaved: in the file, each head is followed by the same head of the other parts.
                scale = size * parts if interleaved else size
                region.append(slice(bounds.start * scale, bounds.stop * scale))
            elif merged_dim is None or dim != merged_dim + 1:
                region.append(bounds)
        if interleaved and merged_dim is None:
            region[-1] = slice(region[-1].start * parts, region[-1].stop * parts)
        if not interleaved:
            # Concatenated: this part starts after all previous parts.
            offset = sum(part.file_shape[-1] for part in self.entry.parts[: self.position])
            region[-1] = slice(region[-1].start + offset, region[-1].stop + offset)
        order = self.entry.table.file_order
        x = read(self.tensor, order(tuple(region)))
        x = x.transpose(order(tuple(range(x.ndim))))
        if interleaved:
            x = x.reshape(*x.shape[:-1], -1, parts, size)[..., self.position, :]
            x = x[..., 0] if merged_dim is None else x
        elif merged_dim is not None:
            x = x.reshape(*x.shape[:merged_dim], -1, size, *x.shape[merged_dim + 1 :])
        # Complete heads are read, and sliced here.
        return x if merged_dim is None else x[(*(slice(None),) * (merged_dim + 1), block[merged_dim + 1])]


_HEADS = (("heads", "head_size"), ("kv_heads", "head_size"))


def source_slices(entries: Iterable[FileTensor], names: Mapping[str, str]) -> dict[str, list[SourceSlice]]:
    """Finds the pieces of each parameter, ordered by layer and expert.

    Args:
        entries: the tensors of the file.
        names: maps names of tensors without prefix to their names in the file.
    """
    pieces_of: dict[str, list[SourceSlice]] = {}
    for entry in entries:
        for position, part in enumerate(entry.parts):
            pieces_of.setdefault(part.path, []).append(SourceSlice(names[entry.name], entry, position))
    return {path: sorted(pieces, key=lambda piece: piece.index) for path, pieces in pieces_of.items()}


def read_block(
    pieces: Iterable[SourceSlice], block: Slices, read: ReadRegion, *, max_elements: int
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Reads a block of a parameter in pieces of at most `max_elements` elements.

    Args:
        pieces: all pieces of the parameter.
        block: block of the parameter.
        read: reads a region of the file.
        max_elements: maximum number of elements of a piece. A longer row of the file is still read as one piece.

    Yields:
        The offset of a piece inside the block, and its array, with as many dimensions, in the dtype of the file.
    """
    for piece in pieces:
        outer, inner = block[: len(piece.index)], block[len(piece.index) :]
        if not all(bounds.start <= position < bounds.stop for bounds, position in zip(outer, piece.index, strict=True)):
            continue
        leading = tuple(position - bounds.start for bounds, position in zip(outer, piece.index, strict=True))
        for part in _split_block(inner, piece.outermost_dim, max_elements):
            x = piece.read(part, read)
            start = tuple(bounds.start - full.start for bounds, full in zip(part, inner, strict=True))
            yield (*leading, *start), x.reshape((1,) * len(leading) + x.shape)


def _split_block(block: Slices, along: int, max_elements: int) -> Iterator[Slices]:
    """Splits a block along one dimension into parts of at most `max_elements` elements."""
    bounds = block[along]
    row_elements = int(np.prod([other.stop - other.start for dim, other in enumerate(block) if dim != along]))
    step = max(1, max_elements // max(1, row_elements))
    for start in range(bounds.start, bounds.stop, step):
        yield (*block[:along], slice(start, min(start + step, bounds.stop)), *block[along + 1 :])
