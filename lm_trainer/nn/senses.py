"""A decoder whose head reads a weighted sum of the sense vectors of the tokens so far.

Shape letters: B rows, S positions, T keys (or new tokens), D hidden dimension, N senses, H size of a sense's queries, M
width of an MLP, or of all senses together.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.nn.attention import cache_bias, causal_bias
from lm_trainer.nn.attention_dispatch import dispatch_attention
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.decoder import Decoder, DropoutKeys, HeadKey
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import Linear, dropout
from lm_trainer.nn.mlp import Mlp, make_activation
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.spec import DecoderSpec, SenseSpec


class SenseVectors(nnx.Module):
    """Computes the senses of a token from its embedding, without position, with a residual layer and an MLP."""

    def __init__(self, spec: SenseSpec, dim: int, *, init: Initializer):
        self.spec, axis = spec, {"embed": dim}
        self.input_norm = make_norm(spec.norm, axis, init=init)
        self.mlp_pre_norm = make_norm(spec.norm, axis, init=init)
        self.mlp = Mlp(spec.mlp, dim, init=init)
        self.out_pre_norm = make_norm(spec.norm, axis, init=init)
        count, width, bias = spec.attention.num_heads, {"mlp": spec.out.hidden_dim}, spec.out.bias
        self.up = Linear(axis, width, bias=bias, init=init)
        # One axis for all senses and their dimensions, so that this weight is a matrix like any other.
        self.down = Linear(width, {"embed": count * dim}, bias=bias, init=init)
        self.activation = make_activation(spec.out.activation, init=init)

    def __call__(self, x_BSD: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns the senses, [B, S, N, D] in the dtype of `x_BSD`."""
        first, second = (None, None) if key is None else jax.random.split(key)
        adapters = None if key is None else jax.random.fold_in(key, 2)
        y_BSD = x_BSD + dropout(self.input_norm(x_BSD), self.spec.dropout, first)
        y_BSD = y_BSD + dropout(self.mlp(self.mlp_pre_norm(y_BSD), key=adapters), self.spec.dropout, second)
        h_BSM = self.activation(self.up(self.out_pre_norm(y_BSD), key=adapters))
        z_BSM = self.down(h_BSM, key=adapters)
        return z_BSM.reshape(*x_BSD.shape[:-1], -1, x_BSD.shape[-1])


class SenseCache(NamedTuple):
    """Keys and values, at past positions, of the layers and of the attention that computes the sense weights."""

    backbone: KvCache
    senses: KvCache
    """A cache with one layer: the keys of the sense weights, with the senses as values."""


class SenseDecoder(Decoder):
    """The head reads sum_j sum_n a_nij C(x_j)_n / N at position i (Hewitt et al. 2023, equations 1 and 6 to 8).

    C(x)_n is sense n of token x, and a_n = softmax(q_n k_n^T / sqrt(H)), with q and k computed from the last hidden
    state h of the layers. The paper does not divide by N, but its published models do; this makes the sum as large as
    one sense.
    """

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        super().__init__(spec, rngs=rngs)
        assert spec.senses is not None
        init = Initializer(rngs, spec.init_std, spec.residual_std)
        weights = self.weights = spec.senses.attention
        heads = {"heads": weights.num_heads, "head_size": weights.head_dim}
        self.senses = SenseVectors(spec.senses, spec.hidden_dim, init=init)
        self.q = Linear({"embed": spec.hidden_dim}, heads, bias=weights.bias, init=init)
        self.k = Linear({"embed": spec.hidden_dim}, heads, bias=weights.bias, init=init)

    def dropout_keys(self, key: jax.Array | None) -> DropoutKeys:
        """Same as for `Decoder`."""
        if key is None:
            return DropoutKeys()
        backbone_key, senses_key, weights_key = jax.random.split(key, 3)
        embed_key, blocks_key, _ = super().dropout_keys(backbone_key)
        return DropoutKeys(embed_key, blocks_key, (senses_key, weights_key))

    def head_input(self, x_BSD: jax.Array, tokens_BS: jax.Array, segments_BS: jax.Array, *, key: HeadKey) -> jax.Array:
        """Same as for `Decoder`; `key` is a pair of keys, for the senses and for their weights."""
        senses_key, weights_key = (None, None) if key is None else key
        h_BSD = super().head_input(x_BSD, tokens_BS, segments_BS, key=None)
        q_BSNH, k_BSNH = self._queries_and_keys(h_BSD, key=weights_key)
        c_BSND = self.senses(self.embed.lookup(tokens_BS).astype(h_BSD.dtype), key=senses_key)
        return self._weigh_senses(q_BSNH, k_BSNH, c_BSND, causal_bias(segments_BS), key=weights_key)

    def init_cache(self, batch_size: int, capacity: int, *, dtype: DTypeLike = jnp.float32) -> SenseCache:
        """Same as for `Decoder`."""
        shape = (1, batch_size, capacity, self.weights.num_heads)
        keys = jnp.zeros((*shape, self.weights.head_dim), dtype)
        senses = jnp.zeros((*shape, self.spec.hidden_dim), dtype)
        return SenseCache(super().init_cache(batch_size, capacity, dtype=dtype), KvCache(keys, senses))

    def decode_hidden(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: SenseCache, counts_B: jax.Array | None = None
    ) -> tuple[jax.Array, SenseCache]:
        """Same as for `Decoder`."""
        h_BTD, backbone = super().decode_hidden(tokens_BT, positions_BT, cache.backbone, counts_B)
        q_BTNH, k_BTNH = self._queries_and_keys(h_BTD)
        c_BTND = self.senses(self.embed.lookup(tokens_BT).astype(h_BTD.dtype))
        senses, k_BCNH, c_BCND = cache.senses.write(0, positions_BT, k_BTNH, c_BTND)
        bias = cache_bias(positions_BT, cache.senses.k.shape[2])
        return self._weigh_senses(q_BTNH, k_BCNH, c_BCND, bias), SenseCache(backbone, senses)

    def _queries_and_keys(self, h_BSD: jax.Array, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        adapters = None if key is None else jax.random.fold_in(key, 0)
        q_BSNH, k_BSNH = self.q(h_BSD, key=adapters), self.k(h_BSD, key=adapters)
        if self.weights.scores.upcast:
            q_BSNH, k_BSNH = q_BSNH.astype(jnp.float32), k_BSNH.astype(jnp.float32)
        return q_BSNH * jnp.asarray(self.weights.head_dim**-0.5, q_BSNH.dtype), k_BSNH

    def _weigh_senses(
        self,
        q_BSNH: jax.Array,
        k_BTNH: jax.Array,
        c_BTND: jax.Array,
        bias_B1ST: jax.Array,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        o_BSND = dispatch_attention(self.weights, q_BSNH, k_BTNH, c_BTND, bias_B1ST, key=key)
        return jnp.sum(o_BSND, axis=2) * jnp.asarray(1.0 / self.weights.num_heads, o_BSND.dtype)
