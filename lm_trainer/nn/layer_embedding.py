"""The token embedding of a layer's own.

Shape letters: B rows, S positions, D hidden dimension, P size of the embedding.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.init import Initializer
from lm_trainer.nn.layer_values import FirstValues
from lm_trainer.nn.linear import ACTIVATIONS, Linear
from lm_trainer.nn.norm import Norm, make_norm
from lm_trainer.nn.read import read
from lm_trainer.nn.spec import LayerEmbeddingSpec


class LayerEmbedding(nnx.Module):
    """Computes `norm(out(activation(gate(x)) * e))`; see `LayerEmbeddingSpec`.

    The table is a parameter of the layer, so that a device which holds one layer at a time holds one table at a time.
    """

    def __init__(self, spec: LayerEmbeddingSpec, dim: int, *, init: Initializer):
        self.spec = spec
        self.tokens = init.normal({"vocab": spec.vocab_size, "latent": spec.dim})
        self.project = Linear({"embed": dim}, {"latent": spec.dim}, bias=False, init=init)
        self.gate = Linear({"embed": dim}, {"latent": spec.dim}, bias=False, init=init)
        self.out = Linear({"latent": spec.dim}, {"embed": dim}, bias=False, init=init, residual=True)
        self.norm = make_norm(spec.norm, {"embed": dim}, init=init)
        self.without_gain = Norm(dataclasses.replace(spec.norm, scale=False), {"latent": spec.dim}, init=init)

    def __call__(
        self, x_BSD: jax.Array, tokens_BS: jax.Array, first: FirstValues, *, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the term of the stream, [B, S, D] in the dtype of `x_BSD`. The embedding is computed in float32.

        Args:
            x_BSD: the stream after the MLP.
            tokens_BS: int32 token ids; one past the end of the table gives NaN.
            first: values of the embedding before the first layer.
            key: for dropout in adapters.
        """
        rows_BSP = jnp.take(read(self.tokens), tokens_BS, axis=0, mode="fill") * math.sqrt(self.spec.dim)
        scaled_BSP = self.project(first.x_BSD, key=key) * x_BSD.shape[-1] ** -0.5
        projected_BSP = self.without_gain(scaled_BSP.astype(jnp.float32)) * first.gain_BSP
        e_BSP = ((projected_BSP + rows_BSP) * math.sqrt(0.5)).astype(x_BSD.dtype)
        gated_BSP = ACTIVATIONS[self.spec.activation](self.gate(x_BSD, key=key)) * e_BSP
        return self.norm(self.out(gated_BSP, key=key))
