"""Splits parameters into blocks that have separate preconditioners.

Shape letters: K blocks of one parameter (over all its layers), I inputs of a block, O outputs of a block.

For example, the attention queries of 12 layers with 8 heads of size 64 and hidden dimension 512, in blocks of at most
256, have shape (12, 512, 8, 64) as a parameter, (12, 512, 512) as matrices, and K, I, O = 12 * 2 * 2, 256, 256 as
blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_trainer.optim.params import Param

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Blocks:
    """Blocks of one parameter. Each layer's matrix is split separately; a vector is a matrix with one output."""

    shape: tuple[int, ...]
    """Shape of the parameter."""
    stacked: int
    """Number of stacked matrices, for example layers."""
    inputs: tuple[int, int]
    """(number of blocks along the inputs, size of a block); their product is the number of inputs."""
    outputs: tuple[int, int]
    """The same for the outputs."""

    @classmethod
    def for_param(cls, param: Param, max_size: int | None, *, inputs: bool, outputs: bool) -> Blocks:
        """Splits a parameter into blocks of at most `max_size`, along its inputs and outputs as requested."""
        stacked, i, o = matrix_sizes(param)
        input_blocks = fit_blocks(i, max_size) if inputs else (1, i)
        return cls(param.shape, stacked, input_blocks, fit_blocks(o, max_size) if outputs else (1, o))

    @property
    def count(self) -> int:
        """K, the number of blocks."""
        return self.stacked * self.inputs[0] * self.outputs[0]

    def split(self, x: jax.Array) -> jax.Array:
        """Splits an array that has the parameter's shape into [K, I, O]."""
        (a, i), (b, o) = self.inputs, self.outputs
        # The two counts must first be adjacent, because a plain reshape would mix rows of neighbouring blocks.
        return x.reshape(self.stacked, a, i, b, o).transpose(0, 1, 3, 2, 4).reshape(-1, i, o)

    def join(self, x_KIO: jax.Array) -> jax.Array:
        """Joins blocks to an array of the parameter's shape; the inverse of `split`."""
        (a, i), (b, o) = self.inputs, self.outputs
        return x_KIO.reshape(self.stacked, a, b, i, o).transpose(0, 1, 3, 2, 4).reshape(self.shape)


def matrix_sizes(param: Param) -> tuple[int, int, int]:
    """Returns (number of stacked matrices, inputs, outputs), as `Param.matrix_shape` does; a vector has one output."""
    if param.role != "vector":
        return param.matrix_shape
    return math.prod(param.shape[: param.lead]), math.prod(param.shape[param.lead :]), 1


def fit_blocks(size: int, max_size: int | None) -> tuple[int, int]:
    """Returns (number of blocks, block size) for one dimension: the largest divisor up to `max_size`; None: one block.

    A dimension without a divisor between `max_size` / 4 and `max_size` is not split, because tiny blocks would be
    useless as preconditioners.
    """
    if max_size is None or size <= max_size:
        return 1, size
    best = max(d for d in range(1, max_size + 1) if size % d == 0)
    return (size // best, best) if 4 * best >= max_size else (1, size)
