"""Parameters as an optimizer sees them: name, shape and logical axes.

The numbers of all layers (and experts) are one array. Twelve layers of an attention query with 8 heads of size 64 and
hidden dimension 512 are

    shape          (12, 512, 8, 64)
    axes           ("layers", "embed", "heads", "head_size")
    lead           1                       the axis of layers
    matrix_shape   (12, 512, 512)          [stacked matrices, inputs, outputs]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import jax

Role = Literal["matrix", "embedding", "head", "vector"]

_STACKED = ("layers", "experts")
_HEADS = ("heads", "kv_heads")


@dataclass(frozen=True)
class Param:
    """One parameter; those of all layers (and experts) are one array with leading axes."""

    name: str
    """Dotted, such as `blocks.0.mlp.up.weight`."""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """The logical axis of each dimension."""
    norm: str | None = None
    """The class of the norm that has it, `LayerNorm` or `RMSNorm`; None for what belongs to no norm."""

    @property
    def lead(self) -> int:
        """The number of leading axes that count layers and experts, not numbers of one weight."""
        return next((i for i, axis in enumerate(self.axes) if axis not in _STACKED), len(self.axes))

    @property
    def role(self) -> Role:
        """`matrix`: a hidden layer's linear map; `embedding`: a token or position table; `head`: an untied head of the
        model; `vector`: biases, the scales of norms and other parameters of one dimension.
        """
        dims = self.axes[self.lead :]
        if len(dims) < 2 or self.name.rsplit(".", 1)[-1] == "bias":
            return "vector"
        if "position" in dims:
            return "embedding"
        if "vocab" in dims:
            return "head" if "head" in self.name else "embedding"
        return "matrix"

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(number of stacked matrices, inputs, outputs); heads and head size count as one dimension.

        Raises:
            ValueError: for a parameter that is no matrix.
        """
        sizes: list[int] = []
        previous = None
        # A matrix may have its heads among the inputs (the output projection) or among the outputs (q, k and v).
        for size, axis in zip(self.shape[self.lead :], self.axes[self.lead :], strict=True):
            if axis == "head_size" and previous in _HEADS:
                sizes[-1] *= size
            else:
                sizes.append(size)
            previous = axis
        if len(sizes) != 2:
            raise ValueError(f"{self.name}: axes {self.axes} are not those of a matrix")
        return math.prod(self.shape[: self.lead]), sizes[0], sizes[1]

    def to_matrices(self, x: jax.Array) -> jax.Array:
        """[stacked, inputs, outputs] from an array of the parameter's shape."""
        return x.reshape(self.matrix_shape)

    def from_matrices(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_matrices`."""
        return x.reshape(self.shape)


Params = Mapping[str, Param]
"""By dotted name: the same keys as the flat dict of arrays that an optimizer updates."""
