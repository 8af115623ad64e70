"""Low-rank adapters of weights that are no linear layer's: the embedding, the head and routed experts.

Shape letters: V vocabulary, D hidden dimension, E experts, I inputs, O outputs, R rank; `...` leading dimensions.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.nn.init import LOGICAL_AXES
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.read import read

SUFFIX = "_lora"
"""End of the attribute of an adapter: `tokens_lora` is the adapter of the parameter `tokens`."""


class WeightLora(nnx.Module):
    """Factors A and B of the change of a matrix, or of each of several matrices: scale * A B, [..., I, O].

    Args:
        weight: the adapted weight, [..., I, O], or [O, I] with `outputs_first`.
        config: configuration of the adapter.
        outputs_first: the weight has its outputs before its inputs.
        of_tokens: the inputs are tokens. As in PEFT, A is then zero and B random at the start, and not the reverse.
        rngs: random numbers of the initial values.
    """

    def __init__(
        self,
        weight: nnx.Param,
        config: LoraConfig,
        *,
        outputs_first: bool = False,
        of_tokens: bool = False,
        rngs: nnx.Rngs,
    ):
        *lead, first, second = zip(weight.get_value().shape, weight.get_metadata(LOGICAL_AXES), strict=True)
        (inputs, into), (outputs, out) = (second, first) if outputs_first else (first, second)
        sizes, axes = [size for size, _ in lead], [axis for _, axis in lead]
        a_shape, b_shape = (*sizes, inputs, config.rank), (*sizes, config.rank, outputs)
        if of_tokens:
            a, b = jnp.zeros(a_shape, jnp.float32), jax.random.normal(rngs.params(), b_shape, jnp.float32)
        else:
            # As in `Lora`.
            bound = 1.0 / math.sqrt(inputs)
            a = jax.random.uniform(rngs.params(), a_shape, jnp.float32, minval=-bound, maxval=bound)
            b = jnp.zeros(b_shape, jnp.float32)
        self.a = nnx.Param(a, logical_axes=(*axes, into, None))
        self.b = nnx.Param(b, logical_axes=(*axes, None, out))
        self.rank, self.scale, self.dropout = config.rank, config.scale, config.dropout

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Returns the change of the rows of these tokens, [..., O]; NaN for a token past the end of the table."""
        a = jnp.take(read(self.a), tokens, axis=0, mode="fill")
        return self.scale * jnp.matmul(a, read(self.b))

    def change(self) -> jax.Array:
        """Returns the change of the weight, float32 [..., I, O]."""
        a, b = read(self.a, jnp.float32), read(self.b, jnp.float32)
        return self.scale * jnp.matmul(a, b)

    def extend_head(self, h: jax.Array, *, tied: bool, key: jax.Array | None) -> jax.Array:
        """Appends scale * (h A) to the inputs of the head, [..., D + R]; see `extend_weight`.

        Args:
            h: inputs of the head, [..., D].
            tied: the adapter is of the embedding; the head multiplies with its transpose.
            key: for dropout of the inputs of the adapter; None disables it.
        """
        a_DR = read(self.b, h.dtype).T if tied else read(self.a, h.dtype)
        h_MD = dropout(h, self.dropout, key).reshape(-1, h.shape[-1])
        return jnp.concatenate([h, (self.scale * jnp.matmul(h_MD, a_DR)).reshape(*h.shape[:-1], -1)], axis=-1)

    def extend_weight(self, w_VD: jax.Array, *, tied: bool) -> jax.Array:
        """Appends B to the matrix of the head, [V, D + R].

        Its product with the extended inputs is h w^T + scale * (h A) B, in a single sum, without A B in memory.
        """
        b_VR = read(self.a, w_VD.dtype) if tied else read(self.b, w_VD.dtype).T
        return jnp.concatenate([w_VD, b_VR], axis=-1)


def read_adapted(param: nnx.Param, adapter: WeightLora | None, dtype: DTypeLike) -> jax.Array:
    """Returns a weight with the change of its adapter, added in float32 and rounded to `dtype` once."""
    if adapter is None:
        return read(param, dtype)
    return (read(param, jnp.float32) + adapter.change()).astype(dtype)
