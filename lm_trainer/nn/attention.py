"""Self-attention and its masks.

Shape letters: B rows, S queries, T keys, D hidden dimension, N heads, H head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.init import Init
from lm_trainer.nn.linear import Linear, dropout
from lm_trainer.nn.spec import AttentionSpec

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Added to the score of a pair that may not attend: finite, so that no difference of infinities arises."""


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    positions_BS: jax.Array
    """int32, position inside the document."""
    bias_B1ST: jax.Array
    """float32, added to the scores: 0 or `MASKED`."""


def causal_bias(segments_BS: jax.Array) -> jax.Array:
    """[B, 1, S, S]: a query sees itself and what stands before it in the same segment of its row."""
    at = jnp.arange(segments_BS.shape[1])
    allowed_BST = (at[:, None] >= at[None, :]) & (segments_BS[:, :, None] == segments_BS[:, None, :])
    return _bias(allowed_BST)


def cache_bias(positions_BT: jax.Array, capacity: int) -> jax.Array:
    """[B, 1, T, C]: a query at position p sees the slots 0 to p of its row's cache."""
    return _bias(jnp.arange(capacity)[None, None, :] <= positions_BT[:, :, None])


def _bias(allowed_BST: jax.Array) -> jax.Array:
    return jnp.where(allowed_BST, 0.0, MASKED).astype(jnp.float32)[:, None]


class Attention(nnx.Module):
    """Multi-head attention of a sequence to itself (Vaswani et al. 2017)."""

    def __init__(self, spec: AttentionSpec, dim: int, *, init: Init):
        self.spec = spec
        heads = {"heads": spec.num_heads, "head_size": spec.head_dim}
        self.q = Linear({"embed": dim}, heads, bias=spec.bias, init=init)
        self.k = Linear({"embed": dim}, heads, bias=spec.bias, init=init)
        self.v = Linear({"embed": dim}, heads, bias=spec.bias, init=init)
        self.out = Linear(heads, {"embed": dim}, bias=spec.bias, init=init, residual=True)

    def __call__(
        self,
        x_BSD: jax.Array,
        context: Context,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        cache: KvCache | None = None,
    ) -> tuple[jax.Array, KvCache | None]:
        """Attends to `x_BSD` itself, or with a cache to all that it holds, `x_BSD` included."""
        q_BSNH, k_BTNH, v_BTNH = self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)
        if cache is not None:
            cache, k_BTNH, v_BTNH = cache.write(layer, context.positions_BS, k_BTNH, v_BTNH)
        if self.spec.upcast:
            q_BSNH, k_BTNH = q_BSNH.astype(jnp.float32), k_BTNH.astype(jnp.float32)
        o_BSNH = dot_product_attention(
            q_BSNH * self._scale(layer, q_BSNH.dtype), k_BTNH, v_BTNH, context.bias_B1ST, self.spec.dropout, key
        )
        return self.out(o_BSNH), cache

    def _scale(self, layer: jax.Array | int, dtype: DTypeLike) -> jax.Array:
        scale = jnp.float32(self.spec.head_dim**-0.5)
        if self.spec.inverse_layer_scale:
            scale = scale / (jnp.asarray(layer, jnp.float32) + 1.0)
        return scale.astype(dtype)


def dot_product_attention(
    q_BSNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTNH: jax.Array,
    bias_B1ST: jax.Array,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T + bias) v, shape of q, dtype of v; scores in the dtype of q, softmax in float32.

    `q_BSNH` is scaled already. Gradients flow to q, k and v.
    """
    scores_BNST = jnp.einsum("bsnh,btnh->bnst", q_BSNH, k_BTNH).astype(jnp.float32) + bias_B1ST
    highest = jax.lax.stop_gradient(jnp.max(scores_BNST, axis=-1, keepdims=True))
    e_BNST = jnp.exp(scores_BNST - highest)
    # The result is divided instead of the probabilities, which are T / H times as many. The reciprocal is written
    # out because a compiler may turn a division into it in one program and not in another.
    r_BSN1 = (1.0 / jnp.sum(e_BNST, axis=-1)).transpose(0, 2, 1)[..., None]
    e_BNST = dropout(e_BNST, dropout_rate, key).astype(v_BTNH.dtype)
    o_BSNH = jnp.einsum("bnst,btnh->bsnh", e_BNST, v_BTNH)
    return o_BSNH * r_BSN1.astype(v_BTNH.dtype)
