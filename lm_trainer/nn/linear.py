"""Parameters with logical axes, linear maps, dropout and activations.

Shape letters: I inputs of a linear map, O its outputs, both flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.spec import Activation

LOGICAL_AXES = "logical_axes"
"""The metadata key of a parameter's logical axes. Flax gives no meaning to it: no mesh is needed to build a model."""


def normal_param(dims: Mapping[str, int], std: float, *, rngs: nnx.Rngs) -> nnx.Param:
    """A float32 parameter, normal with mean 0; `dims` gives the size of each logical axis, in order."""
    value = std * jax.random.normal(rngs.params(), tuple(dims.values()), jnp.float32)
    return nnx.Param(value, logical_axes=tuple(dims))


def constant_param(dims: Mapping[str, int], value: float) -> nnx.Param:
    """A float32 parameter that starts as `value` everywhere."""
    return nnx.Param(jnp.full(tuple(dims.values()), value, jnp.float32), logical_axes=tuple(dims))


class Linear(nnx.Module):
    """Maps the trailing `inputs` dimensions of an array to `outputs`; the weight has the shape inputs + outputs."""

    def __init__(
        self, inputs: Mapping[str, int], outputs: Mapping[str, int], *, std: float, bias: bool, rngs: nnx.Rngs
    ):
        self.in_shape, self.out_shape = tuple(inputs.values()), tuple(outputs.values())
        self.weight = normal_param({**inputs, **outputs}, std, rngs=rngs)
        self.bias = constant_param(outputs, 0.0) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes in the dtype of `x`."""
        lead = x.shape[: x.ndim - len(self.in_shape)]
        # Products of two matrices: XLA:CPU runs the gradients of batched forms far slower.
        w_IO = self.weight[...].astype(x.dtype).reshape(math.prod(self.in_shape), -1)
        y = (x.reshape(-1, w_IO.shape[0]) @ w_IO).reshape(*lead, *self.out_shape)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets elements to zero with probability `rate` and scales the rest, so that the mean stays; no key, no change."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def gelu_new(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU."""
    return jax.nn.gelu(x, approximate=True)


def gelu(x: jax.Array) -> jax.Array:
    """The exact form: the cumulative distribution function of the normal distribution at x, times x."""
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
