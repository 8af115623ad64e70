"""Parameters cut into blocks that are preconditioned by themselves.

Shape letters: K blocks of one parameter (and of all its layers), I inputs of a block, O its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from lm_trainer.optim.params import Param


@dataclass(frozen=True)
class Blocks:
    """How one parameter is cut. Each layer's matrix is cut by itself; a vector is a matrix with one output."""

    shape: tuple[int, ...]
    """Of the parameter."""
    stacked: int
    inputs: tuple[int, int]
    """How many blocks side by side, and their size; the two multiply to the number of inputs."""
    outputs: tuple[int, int]

    @property
    def count(self) -> int:
        """K."""
        return self.stacked * self.inputs[0] * self.outputs[0]

    def split(self, x: jax.Array) -> jax.Array:
        """[K, I, O] from an array of the parameter's shape."""
        (a, i), (b, o) = self.inputs, self.outputs
        return x.reshape(self.stacked, a, i, b, o).transpose(0, 1, 3, 2, 4).reshape(-1, i, o)

    def join(self, x_KIO: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        (a, i), (b, o) = self.inputs, self.outputs
        return x_KIO.reshape(self.stacked, a, b, i, o).transpose(0, 1, 3, 2, 4).reshape(self.shape)


def matrix_sizes(param: Param) -> tuple[int, int, int]:
    """(number of stacked matrices, inputs, outputs); a vector has one output."""
    if param.role != "vector":
        return param.matrix_shape
    stacked = 1
    for size in param.shape[: param.lead]:
        stacked *= size
    rest = 1
    for size in param.shape[param.lead :]:
        rest *= size
    return stacked, rest, 1


def cut(size: int, most: int | None) -> tuple[int, int]:
    """(how many blocks, their size) for one dimension: blocks as large as its divisors allow, up to `most`.

    A dimension without a divisor from `most` / 4 to `most` stays whole: tiny blocks would precondition nothing.
    """
    if most is None or size <= most:
        return 1, size
    best = max(d for d in range(1, most + 1) if size % d == 0)
    return (size // best, best) if 4 * best >= most else (1, size)
