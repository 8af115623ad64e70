"""Parameters as optimizers see them: name, shape and logical axes.

The parameters of all layers (and experts) are one array. For example, the attention queries of 12 layers with 8 heads
of size 64 and hidden dimension 512 have

    shape          (12, 512, 8, 64)
    axes           ("layers", "embed", "heads", "head_size")
    lead           1                       the axis of layers
    matrix_shape   (12, 512, 512)          [stacked matrices, inputs, outputs]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import jax

Role = Literal["matrix", "embedding", "head", "vector"]

_STACKED = ("layers", "experts")
_HEADS = ("heads", "kv_heads")


@dataclass(frozen=True)
class Multipliers:
    """Factors of the settings of one parameter, relative to the settings of the optimizer."""

    rate: float = 1.0
    """Factor of the learning rate. The product of learning rate and weight decay does not change."""
    epsilon: float = 1.0
    """Factor of the optimizer's epsilon, which has the unit of gradients."""


@dataclass(frozen=True)
class Param:
    """One parameter. All layers (and experts) are in one array with leading axes."""

    name: str
    """Dotted name, such as `blocks.0.mlp.up.weight`."""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis of each dimension."""
    norm: str | None = None
    """Class of the norm that the parameter belongs to, `LayerNorm` or `RMSNorm`; None for other parameters."""
    multipliers: Multipliers = Multipliers()

    @property
    def lead(self) -> int:
        """Number of leading axes, over layers and experts."""
        return next((i for i, axis in enumerate(self.axes) if axis not in _STACKED), len(self.axes))

    @property
    def role(self) -> Role:
        """Kind of the parameter.

        `matrix`: a linear map of a hidden layer; `embedding`: a token or position table; `head`: an untied head of the
        model; `vector`: biases, scales of norms and other parameters with one dimension, and convolutions with separate
        weights for each channel.
        """
        dims = self.axes[self.lead :]
        if len(dims) < 2 or "taps" in dims or self.name.rsplit(".", 1)[-1] == "bias":
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
            ValueError: if the parameter is not a matrix.
        """
        sizes: list[int] = []
        previous = None
        # The heads of a matrix may be among its inputs (the output projection) or among its outputs (q, k and v).
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
        """Reshapes an array that has the parameter's shape to [stacked, inputs, outputs]."""
        return x.reshape(self.matrix_shape)

    def from_matrices(self, x: jax.Array) -> jax.Array:
        """Reshapes matrices to the parameter's shape; the inverse of `to_matrices`."""
        return x.reshape(self.shape)


Params = Mapping[str, Param]
"""Parameters by dotted name, with the same keys as the flat dict of arrays that an optimizer updates."""

Arrays: TypeAlias = "dict[str, jax.Array]"
"""Arrays of parameters, gradients or updates by dotted name."""
