"""The position-wise MLP of a layer.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

import jax
from flax import nnx

from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import ACTIVATIONS, Linear
from lm_trainer.nn.spec import MlpSpec


class Mlp(nnx.Module):
    """Computes up, activation, down; if gated, multiplies up by the activation of the gate before down."""

    def __init__(self, spec: MlpSpec, dim: int, *, init: Initializer):
        self.spec = spec
        # The order of these lines determines the random keys, so reordering them would change the initial weights.
        self.up = Linear({"embed": dim}, {"mlp": spec.hidden_dim}, bias=spec.bias, init=init)
        self.down = Linear({"mlp": spec.hidden_dim}, {"embed": dim}, bias=spec.bias, init=init, residual=True)
        gate = Linear({"embed": dim}, {"mlp": spec.hidden_dim}, bias=spec.bias, init=init) if spec.gated else None
        self.gate = gate

    def __call__(self, x_BSD: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns [B, S, D] in the dtype of `x_BSD`; the key is for dropout in adapters."""
        activation = ACTIVATIONS[self.spec.activation]
        if self.gate is None:
            return self.down(activation(self.up(x_BSD, key=key)), key=key)
        return self.down(activation(self.gate(x_BSD, key=key)) * self.up(x_BSD, key=key), key=key)
