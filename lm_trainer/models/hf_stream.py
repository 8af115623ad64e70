"""Reading of parameters slice by slice: finds the regions of a file's tensors that make up a block of a parameter.

A block is a slice, with start and stop, for each dimension of a parameter or of the part of it that the file has in one
piece; a region is the same of a tensor of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lm_trainer.models.hf_table import FileTensor

Slices = tuple[slice, ...]
ReadRegion = Callable[[str, Slices], np.ndarray]
"""Reads a region of the tensor of this name in the file."""


class SourceSlice(NamedTuple):
    """One part of a tensor of the file, and where it belongs."""

    tensor: str
    """Its name in the file."""
    entry: FileTensor
    position: int
    """The index of the part among those of the entry."""

    @property
    def index(self) -> tuple[int, ...]:
        """Layer and expert, as far as the parameter has such axes."""
        return self.entry.parts[self.position].index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.parts[self.position].leaf.part_shape

    @property
    def _merged(self) -> int | None:
        """The dimension of heads, which in the file is one with the dimension of head_size; None without heads."""
        axes = self.entry.parts[self.position].leaf.part_axes
        return next((at for at in range(len(axes) - 1) if axes[at : at + 2] in _HEADS), None)

    @property
    def slow(self) -> int:
        """Our dimension that comes first in the file: a block that is thin along it is one contiguous range there."""
        if not self.entry.table.transposed:
            return 0
        last = len(self.shape) - 1
        return last - 1 if self._merged == last - 1 else last

    def read(self, block: Slices, read: ReadRegion) -> np.ndarray:
        """A block of this part, in the dtype of the file, from no more of the file than the rows and columns of it."""
        merged, interleaved, parts = self._merged, self.entry.table.interleaved, len(self.entry.parts)
        size = self.shape[-1] if merged is None else self.shape[merged + 1]
        region: list[slice] = []
        for at, cut in enumerate(block):
            if merged is not None and at == merged:
                # Interleaved: each head in the file is followed by the same head of the other parts.
                scale = size * parts if interleaved else size
                region.append(slice(cut.start * scale, cut.stop * scale))
            elif merged is None or at != merged + 1:
                region.append(cut)
        if not interleaved:
            # Parts that are joined one after another: this one starts where those before it end.
            before = sum(part.leaf.file_shape[-1] for part in self.entry.parts[: self.position])
            region[-1] = slice(region[-1].start + before, region[-1].stop + before)
        transposed = self.entry.table.transposed
        x = read(self.tensor, tuple(region[::-1] if transposed else region))
        x = x.T if transposed else x
        if interleaved:
            x = x.reshape(*x.shape[:-1], -1, parts, size)[..., self.position, :]
        elif merged is not None:
            x = x.reshape(*x.shape[:merged], -1, size, *x.shape[merged + 1 :])
        # Heads are read whole, and cut here.
        return x if merged is None else x[(*(slice(None),) * (merged + 1), block[merged + 1])]


_HEADS = (("heads", "head_size"), ("kv_heads", "head_size"))


def source_slices(entries: Iterable[FileTensor], names: Mapping[str, str]) -> dict[str, list[SourceSlice]]:
    """For each parameter of ours the pieces that make it up, in the order of layers and experts.

    Args:
        entries: the tensors of the file.
        names: from their names without prefix to those in the file.
    """
    found: dict[str, list[SourceSlice]] = {}
    for entry in entries:
        for position, part in enumerate(entry.parts):
            found.setdefault(part.path, []).append(SourceSlice(names[entry.name], entry, position))
    return {path: sorted(pieces, key=lambda piece: piece.index) for path, pieces in found.items()}


def read_block(
    pieces: Iterable[SourceSlice], block: Slices, read: ReadRegion, *, max_elements: int
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Reads a block of a parameter in pieces of at most `max_elements` elements.

    Args:
        pieces: all of the parameter.
        block: of the parameter.
        read: reads a region of the file.
        max_elements: of a piece; a row of the file that is longer is read whole.

    Yields:
        The place inside the block, and an array for it with as many dimensions, in the dtype of the file.
    """
    for piece in pieces:
        outer, inner = block[: len(piece.index)], block[len(piece.index) :]
        if not all(cut.start <= at < cut.stop for cut, at in zip(outer, piece.index, strict=True)):
            continue
        where = tuple(at - cut.start for cut, at in zip(outer, piece.index, strict=True))
        for part in _thin(inner, piece.slow, max_elements):
            x = piece.read(part, read)
            start = tuple(cut.start - whole.start for cut, whole in zip(part, inner, strict=True))
            yield (*where, *start), x.reshape((1,) * len(where) + x.shape)


def _thin(block: Slices, along: int, max_elements: int) -> Iterator[Slices]:
    """Cuts a block along one dimension into parts of at most `max_elements` elements."""
    cut = block[along]
    others = int(np.prod([each.stop - each.start for at, each in enumerate(block) if at != along]))
    step = max(1, max_elements // max(1, others))
    for start in range(cut.start, cut.stop, step):
        yield (*block[:along], slice(start, min(start + step, cut.stop)), *block[along + 1 :])
