"""Attention of a decoder to the output of an encoder.

Shape letters: B rows, S queries, F positions of the encoder, D hidden dimension, N heads, K key and value heads, H head
size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention_dispatch import dispatch_attention
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.spec import AttentionSpec


class CrossAttention(nnx.Module):
    """Multi-head attention with queries from one stream, and keys and values from another (Vaswani et al. 2017, section
    3.2.3).
    """

    def __init__(self, spec: AttentionSpec, dim: int, *, init: Initializer):
        self.spec = spec
        heads = {"heads": spec.num_heads, "head_size": spec.head_dim}
        self.q = Linear({"embed": dim}, heads, bias=spec.bias, init=init)
        self.k = Linear({"embed": dim}, heads, bias=spec.bias and spec.key_bias, init=init)
        self.v = Linear({"embed": dim}, heads, bias=spec.bias, init=init)
        self.out = Linear(heads, {"embed": dim}, bias=spec.out_bias, init=init, residual=True)

    def keys_and_values(self, memory_BFD: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Projects the output of an encoder to keys and values, [B, F, K, H] each; `key` is for dropout in adapters."""
        return self.k(memory_BFD, key=key), self.v(memory_BFD, key=key)

    def __call__(
        self,
        x_BSD: jax.Array,
        memory: jax.Array | KvCache | None,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        adapter_key: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from every position to all of `memory`; returns [B, S, D]. Arguments as in `ForwardContext` and
        `Attention`.

        Precomputed keys and values may have fewer rows than `x_BSD`: several consecutive rows of `x_BSD` then share one
        row.
        `key` is for dropout of the probabilities, `adapter_key` for dropout in adapters.
        """
        assert memory is not None
        q_BSNH = self.q(x_BSD, key=adapter_key)
        if isinstance(memory, KvCache):
            k_BFKH, v_BFKH = memory.k[layer], memory.v[layer]
        else:
            k_BFKH, v_BFKH = self.keys_and_values(memory, key=adapter_key)
        scores = self.spec.scores
        if scores.upcast:
            q_BSNH, k_BFKH = q_BSNH.astype(jnp.float32), k_BFKH.astype(jnp.float32)
        scale = self.spec.head_dim**-0.5 if scores.scale is None else scores.scale
        q_BSNH = q_BSNH * jnp.asarray(scale, q_BSNH.dtype)
        # Beams of a row share the encoder output. As there is no mask, their queries can be treated as more positions
        # of one row.
        shared_BSNH = q_BSNH.reshape(k_BFKH.shape[0], -1, *q_BSNH.shape[2:])
        bias_11SF = jnp.zeros((1, 1, shared_BSNH.shape[1], k_BFKH.shape[1]), jnp.float32)
        o_BSNH = dispatch_attention(self.spec, shared_BSNH, k_BFKH, v_BFKH, bias_11SF, key=key)
        return self.out(o_BSNH.reshape(q_BSNH.shape), key=adapter_key)
