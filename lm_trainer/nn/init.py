"""Initial values of parameters with their logical axes, and stacking of parameters over layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

LOGICAL_AXES = "logical_axes"
"""Metadata key of a parameter's logical axes. Flax ignores it, so building a model needs no mesh."""
WRITES_RESIDUAL = "writes_residual"
"""Metadata key that is true for the weight and the bias of the last linear map of a sublayer."""

M = TypeVar("M", bound=nnx.Module)


@dataclass(frozen=True)
class Initializer:
    """Makes float32 parameters of a module. `dims` maps the name of each logical axis to its size, in order."""

    rngs: nnx.Rngs
    std: float
    """Standard deviation of weights."""
    residual_std: float
    """Standard deviation of weights that write to the residual stream."""
    flat: bool = False
    """Sample one long row and reshape it. This compiles up to five times faster, but on a mesh each device first holds
    the full array. For small arrays, such as a parameter of one layer."""

    def normal(self, dims: Mapping[str, int], *, residual: bool = False) -> nnx.Param:
        """Samples from the normal distribution with mean 0."""
        shape = tuple(dims.values())
        # Both ways draw the same bits, because the generator numbers the elements of an array in C order.
        draw = jax.random.normal(self.rngs.params(), (math.prod(shape),) if self.flat else shape, jnp.float32)
        std = self.residual_std if residual else self.std
        return nnx.Param((std * draw).reshape(shape), logical_axes=tuple(dims), writes_residual=residual)

    def uniform(self, dims: Mapping[str, int], bound: float) -> nnx.Param:
        """Samples from the uniform distribution between `-bound` and `bound`."""
        draw = jax.random.uniform(self.rngs.params(), tuple(dims.values()), jnp.float32, -bound, bound)
        return nnx.Param(draw, logical_axes=tuple(dims))

    def given(self, dims: Mapping[str, int], values: jax.Array) -> nnx.Param:
        """Makes a parameter with these values, float32 in the shape of `dims`."""
        return nnx.Param(values, logical_axes=tuple(dims))

    def constant(self, dims: Mapping[str, int], value: float, *, residual: bool = False) -> nnx.Param:
        """Makes a parameter whose elements all have the same value."""
        values = jnp.full(tuple(dims.values()), value, jnp.float32)
        return nnx.Param(values, logical_axes=tuple(dims), writes_residual=residual)


def build_stacked(build: Callable[[nnx.Rngs], M], keys: jax.Array) -> M:
    """Builds one module that holds as many layers as there are keys: each parameter has a leading `layers` axis.

    The layers are built in a loop, so the random numbers of only one layer exist at a time.
    """
    module = jax.lax.map(lambda key: build(nnx.Rngs(key)), keys)
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param):
            # The loop adds the axis to the arrays but not to their metadata.
            variable.set_metadata(logical_axes=("layers", *variable.get_metadata(LOGICAL_AXES)))
    return module
