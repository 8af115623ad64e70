"""Shapes of parameters, and of their slices in the tensors of a Hugging Face file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ParamInfo:
    """Shape and logical axes of one parameter, including its `layers` axis if it has one."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    in_files: bool = True
    """False for a value that only training needs, such as the load of experts."""
    layers: range = range(0)
    """Numbers of the layers, in the order of the rows of the `layers` axis."""

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def experts(self) -> int:
        """Number of experts in each layer; 0 if the parameter has no such axis."""
        return self.shape[self.stacked] if self.axes[self.stacked] == "experts" else 0


class ParamSlice(NamedTuple):
    """A slice of one of our parameters."""

    path: str
    index: tuple[int, ...]
    """Indices of the layer and the expert, if the parameter has these axes and the tensor of the file does not."""
    leaf: ParamInfo

    @property
    def axes(self) -> tuple[str, ...]:
        return self.leaf.axes[len(self.index) :]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape[len(self.index) :]

    @property
    def head_size(self) -> int:
        """Size of a head, or 1 if the last dimensions are no heads."""
        return self.shape[-1] if self.axes[-1] == "head_size" else 1

    @property
    def file_shape(self) -> tuple[int, ...]:
        """`shape` with (heads, head_size) merged into one dimension."""
        merged: list[int] = []
        for size, axis, previous in zip(self.shape, self.axes, ("", *self.axes), strict=False):
            if axis == "head_size" and previous in ("heads", "kv_heads"):
                merged[-1] *= size
            else:
                merged.append(size)
        return tuple(merged)
