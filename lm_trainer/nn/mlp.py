"""The position-wise MLP of a layer, and activations with parameters.

Shape letters: B rows, S positions, D hidden dimension; `...` any dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import ACTIVATIONS, Linear
from lm_trainer.nn.read import read
from lm_trainer.nn.spec import Activation, MlpSpec, XieluSpec


class Xielu(nnx.Module):
    """Computes a x^2 + s x for positive x, and b (exp(x) - 1 - x) + s x for negative x, with slope s and learned a, b.

    The parameters p and n are unbounded: a = softplus(p), and b = s + softplus(n).
    """

    def __init__(self, spec: XieluSpec, *, init: Initializer):
        self.spec = spec
        # The inverse of softplus, log(exp(y) - 1).
        self.alpha_p = init.constant({"scalar": 1}, math.log(math.expm1(spec.curvature)))
        self.alpha_n = init.constant({"scalar": 1}, math.log(math.expm1(spec.curvature - spec.slope)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes in float32, and returns the dtype of `x`."""
        y, slope = x.astype(jnp.float32), self.spec.slope
        a = jax.nn.softplus(read(self.alpha_p, jnp.float32)).reshape(())
        b = slope + jax.nn.softplus(read(self.alpha_n, jnp.float32)).reshape(())
        # Selected before the exponential too, so that it and its gradient are finite for large positive inputs.
        curved = jnp.where(y > 0, a * y * y, b * (jnp.expm1(jnp.where(y > 0, 0.0, y)) - y))
        return (curved + slope * y).astype(x.dtype)


def make_activation(spec: Activation | XieluSpec, *, init: Initializer) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation described by `spec`: a function, or a module with parameters."""
    return Xielu(spec, init=init) if isinstance(spec, XieluSpec) else ACTIVATIONS[spec]


class Mlp(nnx.Module):
    """Computes up, activation, down; if gated, multiplies up by the activation of the gate before down."""

    def __init__(self, spec: MlpSpec, dim: int, *, init: Initializer):
        self.spec = spec
        # The order of these lines determines the random keys, so reordering them would change the initial weights.
        self.up = Linear({"embed": dim}, {"mlp": spec.hidden_dim}, bias=spec.bias, init=init)
        self.down = Linear({"mlp": spec.hidden_dim}, {"embed": dim}, bias=spec.bias, init=init, residual=True)
        gate = Linear({"embed": dim}, {"mlp": spec.hidden_dim}, bias=spec.bias, init=init) if spec.gated else None
        self.gate = gate
        self.activation = make_activation(spec.activation, init=init)

    def __call__(self, x_BSD: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns [B, S, D] in the dtype of `x_BSD`; the key is for dropout in adapters."""
        if self.gate is None:
            return self.down(self.activation(self.up(x_BSD, key=key)), key=key)
        return self.down(self.activation(self.gate(x_BSD, key=key)) * self.up(x_BSD, key=key), key=key)
