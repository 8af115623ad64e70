"""One layer of a decoder.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lm_trainer.nn.attention import ForwardContext
from lm_trainer.nn.cache import LayerCache
from lm_trainer.nn.cross_attention import CrossAttention
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.layer_embedding import LayerEmbedding
from lm_trainer.nn.layer_values import SharedKeys
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.mixers import build_mixer
from lm_trainer.nn.mlp import Mlp
from lm_trainer.nn.moe import Moe
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.read import read
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.spec import BlockSpec, MlpSpec


class Block(nnx.Module):
    """Computes `x += post(f(pre(x)))` for each sublayer f in turn: the mixer, cross-attention if there is an encoder,
    the MLP, and the layer's own embedding of the tokens if there is one. An absent norm is the identity.

    With `parallel`, the MLP reads the same input as the mixer; with `shared_norm`, also through the same norm.
    """

    def __init__(self, spec: BlockSpec, dim: int, *, init: Initializer):
        self.dropout = spec.dropout
        self.residual_scale = spec.residual_scale
        self.parallel, self.shared_norm = spec.parallel, spec.shared_norm
        axis = {"embed": dim}
        self.attention_pre_norm = make_norm(spec.pre_norm, axis, init=init)
        # All kinds of mixers have this name in checkpoints.
        self.attention = build_mixer(spec.mixer, dim, init=init)
        self.attention_post_norm = make_norm(spec.post_norm, axis, init=init)
        has_mlp = spec.mlp is not None
        self.mlp_pre_norm = make_norm(spec.mlp_pre_norm, axis, init=init)
        self.mlp = _make_mlp(spec.mlp, dim, init=init)
        self.mlp_post_norm = make_norm(spec.post_norm if has_mlp else None, axis, init=init)
        embedding = spec.layer_embedding
        self.layer_embedding = None if embedding is None else LayerEmbedding(embedding, dim, init=init)
        self.output_scale = init.constant({"latent": 1}, 1.0) if spec.output_scale else None
        self.cross = None if spec.cross is None else CrossAttention(spec.cross, dim, init=init)
        pre_norm, post_norm = (None, None) if spec.cross is None else (spec.pre_norm, spec.post_norm)
        self.cross_pre_norm = make_norm(pre_norm, axis, init=init)
        self.cross_post_norm = make_norm(post_norm, axis, init=init)

    def __call__(
        self,
        x_BSD: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        cache: LayerCache | SharedKeys | None = None,
    ) -> tuple[jax.Array, LayerCache | SharedKeys | None, RouterStats | None]:
        """Returns the residual stream after this layer, the cache, and the router statistics (None if there is no
        router).

        `key` is the dropout key of this layer; None disables dropout.
        """
        inner, after_attention, after_mlp = (None,) * 3 if key is None else jax.random.split(key, 3)
        adapters = None if key is None else jax.random.fold_in(key, 3)
        after_embedding = None if key is None or self.layer_embedding is None else jax.random.fold_in(key, 5)
        # These names appear in profiles and rooflines.
        with jax.named_scope("attention"):
            normed_BSD = self.attention_pre_norm(x_BSD)
            a_BSD, cache = self.attention(normed_BSD, context, layer, key=inner, adapter_key=adapters, cache=cache)
            # For policies that save this result. The norm after it is cheap, so it is recomputed.
            a_BSD = checkpoint_name(a_BSD, "attention")
            y_BSD = x_BSD + self._scale_and_drop(self.attention_post_norm(a_BSD), after_attention)
        if self.cross is not None:
            inner, after_cross = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 4))
            with jax.named_scope("cross_attention"):
                h_BSD = self.cross_pre_norm(y_BSD)
                c_BSD = self.cross(h_BSD, context.memory, layer, key=inner, adapter_key=adapters)
                c_BSD = checkpoint_name(c_BSD, "attention")
                y_BSD = y_BSD + self._scale_and_drop(self.cross_post_norm(c_BSD), after_cross)
        if self.mlp is None:
            return self._finish(y_BSD, context, after_embedding, adapters), cache, None
        with jax.named_scope("mlp"):
            # With a shared norm, `mlp_pre_norm` is the identity.
            input_BSD = normed_BSD if self.shared_norm else x_BSD if self.parallel else y_BSD
            h_BSD = self.mlp_pre_norm(input_BSD)
            if isinstance(self.mlp, Moe):
                m_BSD, stats = self.mlp(h_BSD, context.valid_BS)
            else:
                m_BSD, stats = self.mlp(h_BSD, key=adapters), None
            m_BSD = checkpoint_name(m_BSD, "mlp")
            y_BSD = y_BSD + self._scale_and_drop(self.mlp_post_norm(m_BSD), after_mlp)
        return self._finish(y_BSD, context, after_embedding, adapters), cache, stats

    def _finish(
        self, y_BSD: jax.Array, context: ForwardContext, key: jax.Array | None, adapters: jax.Array | None
    ) -> jax.Array:
        """Adds the layer's own embedding of the tokens, and scales the stream."""
        if self.layer_embedding is not None:
            assert context.tokens_BS is not None
            assert context.first is not None
            with jax.named_scope("layer_embedding"):
                e_BSD = self.layer_embedding(y_BSD, context.tokens_BS, context.first, key=adapters)
                y_BSD = y_BSD + self._scale_and_drop(e_BSD, key)
        return y_BSD if self.output_scale is None else y_BSD * read(self.output_scale, y_BSD.dtype)[None, None]

    def _scale_and_drop(self, x_BSD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Computes the term of the residual stream from the result of a sublayer."""
        return dropout(x_BSD if self.residual_scale is None else x_BSD * self.residual_scale, self.dropout, key)


def _make_mlp(spec: MlpSpec | MoeSpec | None, dim: int, *, init: Initializer) -> Mlp | Moe | None:
    if spec is None:
        return None
    mlp_class: Any = Moe if isinstance(spec, MoeSpec) else spec.module or Mlp
    return mlp_class(spec, dim, init=init)
