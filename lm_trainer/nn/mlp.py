"""The position-wise part of a layer.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

import jax
from flax import nnx

from lm_trainer.nn.init import Init
from lm_trainer.nn.linear import ACTIVATIONS, Linear
from lm_trainer.nn.spec import MlpSpec


class Mlp(nnx.Module):
    """Up, activation, down."""

    def __init__(self, spec: MlpSpec, dim: int, *, init: Init):
        self.spec = spec
        self.up = Linear({"embed": dim}, {"mlp": spec.hidden_dim}, bias=spec.bias, init=init)
        self.down = Linear({"mlp": spec.hidden_dim}, {"embed": dim}, bias=spec.bias, init=init, residual=True)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.spec.activation](self.up(x_BSD)))
