"""Multi-head latent attention: keys and values of all heads come from one small vector per position.

Shape letters: B rows, S queries, T keys, D hidden dimension, N heads, H size of queries and keys, P their part without
positions, R their rotated part, V size of values, L size of the latent of keys and values, X keys and values (P + V).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention import ForwardContext, attend
from lm_trainer.nn.cache import LayerCache
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.measured import MeasuredParam
from lm_trainer.nn.mixer_spec import LatentSpec
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.positions import apply_rope


class LatentAttention(nnx.Module):
    """Multi-head latent attention (arXiv 2405.04434, equations 9 to 19)."""

    def __init__(self, spec: LatentSpec, dim: int, *, init: Initializer):
        self.spec = spec
        queries = {"heads": spec.num_heads, "head_size": spec.head_dim}
        keys_and_values = {"heads": spec.num_heads, "head_size": spec.plain_dim + spec.value_dim}
        values = {"heads": spec.num_heads, "head_size": spec.value_dim}
        size = spec.query_latent_dim
        if size is None:
            self.q = Linear({"embed": dim}, queries, bias=False, init=init)
        else:
            self.q_down = Linear({"embed": dim}, {"latent": size}, bias=spec.bias, init=init)
            self.q_norm = make_norm(spec.norm, {"latent": size}, init=init)
            # The inputs of a matrix are its axis `embed`, by which the weights of large models are sharded.
            self.q_up = Linear({"embed": size}, queries, bias=False, init=init)
        self.kv_down = Linear({"embed": dim}, {"latent": spec.latent_dim + spec.rotary_dim}, bias=spec.bias, init=init)
        self.kv_norm = make_norm(spec.norm, {"latent": spec.latent_dim}, init=init)
        self.kv_up = Linear({"embed": spec.latent_dim}, keys_and_values, bias=False, init=init)
        self.out = Linear(values, {"embed": dim}, bias=spec.bias, init=init, residual=True)
        self.largest_logits: MeasuredParam | None = None

    def __call__(
        self,
        x_BSD: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        adapter_key: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends within `x_BSD` or, with a cache, to all positions in the cache, which include `x_BSD`.

        `key` is for dropout of the probabilities, `adapter_key` for dropout in adapters. The cache holds latents as its
        values, and the rotated parts of keys as its keys.
        """
        q_BSNH = self._queries(x_BSD, context.positions_BS, adapter_key)
        latent_BSL, rotated_BS1R = self._latents(x_BSD, context.positions_BS, adapter_key)
        if cache is None:
            o_BSNV = self._attend_expanded(q_BSNH, latent_BSL, rotated_BS1R, context, layer, (key, adapter_key))
            return self.out(o_BSNV, key=adapter_key), None
        cache, rotated_BT1R, latent_BT1L = cache.write(
            layer, context.positions_BS, rotated_BS1R, latent_BSL[:, :, None]
        )
        rotated_BT1R, latent_BT1L = (x.astype(x_BSD.dtype) for x in (rotated_BT1R, latent_BT1L))
        if self.kv_up.lora is None:
            o_BSNV = self._attend_absorbed(q_BSNH, latent_BT1L, rotated_BT1R, context, layer)
        else:
            o_BSNV = self._attend_expanded(q_BSNH, latent_BT1L[:, :, 0], rotated_BT1R, context, layer, (None, None))
        return self.out(o_BSNV, key=adapter_key), cache

    def _queries(self, x_BSD: jax.Array, positions_BS: jax.Array, key: jax.Array | None) -> jax.Array:
        if self.spec.query_latent_dim is None:
            q_BSNH = self.q(x_BSD, key=key)
        else:
            q_BSNH = self.q_up(self.q_norm(self.q_down(x_BSD, key=key)), key=key)
        plain_BSNP, rotated_BSNR = jnp.split(q_BSNH, [self.spec.plain_dim], axis=-1)
        return jnp.concatenate([plain_BSNP, apply_rope(self.spec.rope, rotated_BSNR, positions_BS)], axis=-1)

    def _latents(self, x_BSD: jax.Array, positions_BS: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Computes the latent of each position, and the part of its keys that is rotated and shared by all heads."""
        latent_BSL, shared_BSR = jnp.split(self.kv_down(x_BSD, key=key), [self.spec.latent_dim], axis=-1)
        return self.kv_norm(latent_BSL), apply_rope(self.spec.rope, shared_BSR[:, :, None], positions_BS)

    def _attend_expanded(
        self,
        q_BSNH: jax.Array,
        latent_BTL: jax.Array,
        rotated_BT1R: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
        keys: tuple[jax.Array | None, jax.Array | None],
    ) -> jax.Array:
        """Computes keys and values of all heads first."""
        key, adapter_key = keys
        plain_BTNP, v_BTNV = jnp.split(self.kv_up(latent_BTL, key=adapter_key), [self.spec.plain_dim], axis=-1)
        rotated_BTNR = jnp.broadcast_to(rotated_BT1R, (*plain_BTNP.shape[:3], self.spec.rotary_dim))
        k_BTNH = jnp.concatenate([plain_BTNP, rotated_BTNR], axis=-1)
        measured = self.largest_logits
        return attend(self.spec.expanded, q_BSNH, k_BTNH, v_BTNV, context, layer, key=key, measured=measured)

    def _attend_absorbed(
        self,
        q_BSNH: jax.Array,
        latent_BT1L: jax.Array,
        rotated_BT1R: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
    ) -> jax.Array:
        """Multiplies queries by the map from latents to keys, and weighted sums of latents by the map to values, which
        takes as many products for any number of cached positions (section 2.1.2).
        """
        plain_dim, spec = self.spec.plain_dim, self.spec.absorbed
        up_LNX = self.kv_up.matrix(q_BSNH.dtype)
        to_latent_BSNL = jnp.einsum("bsnp,lnp->bsnl", q_BSNH[..., :plain_dim], up_LNX[..., :plain_dim])
        q_BSNC = jnp.concatenate([to_latent_BSNL, q_BSNH[..., plain_dim:]], axis=-1)
        k_BT1C = jnp.concatenate([latent_BT1L, rotated_BT1R], axis=-1)
        o_BSNL = attend(spec, q_BSNC, k_BT1C, latent_BT1L, context, layer)
        return jnp.einsum("bsnl,lnv->bsnv", o_BSNL, up_LNX[..., plain_dim:])
