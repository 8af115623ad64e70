"""The decoder that all model families share.

Shape letters: B rows, S positions, T new tokens, D hidden dimension, V vocabulary, C cache capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.nn.attention import ForwardContext, make_cache_context, make_context
from lm_trainer.nn.attention_dispatch import uses_ring
from lm_trainer.nn.cache import KvCache, LayerCache, SplitKvCache, init_cache
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.layer_values import FirstValues, SharedKeys
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.lora_weights import WeightLora
from lm_trainer.nn.multi_token import MultiToken
from lm_trainer.nn.norm import Norm, make_norm
from lm_trainer.nn.pipeline import run_stages
from lm_trainer.nn.read import read
from lm_trainer.nn.ring_layout import from_zigzag, to_zigzag
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stack import Carry, build_blocks, run_blocks
from lm_trainer.parallel.collectives import axis_size


class Embedding(nnx.Module):
    """Token embedding table, and the operations between an embedding and the first layer."""

    def __init__(self, spec: DecoderSpec, *, init: Initializer):
        self.spec = spec.embedding
        self.tokens = init.normal({"vocab": spec.vocab_size, "embed": spec.hidden_dim})
        learned = {"position": spec.num_positions, "embed": spec.hidden_dim}
        self.positions = init.normal(learned) if self.spec.learned_positions else None
        self.norm = make_norm(self.spec.norm, {"embed": spec.hidden_dim}, init=init)
        # The layers' own embeddings share this norm. A layer holds only parameters of its own.
        layer = spec.layer_embedding
        self.layer_norm = None if layer is None else Norm(layer.norm, {"latent": layer.dim}, init=init)
        self.tokens_lora: WeightLora | None = None

    @jax.named_scope("embedding")
    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """Returns float32 [B, S, D]; NaN for a token or position past its table, which indexing would silently clip."""
        x_BSD = self.lookup(tokens_BS)
        if self.spec.scale is not None:
            x_BSD = x_BSD * self.spec.scale
        if self.positions is not None:
            x_BSD = x_BSD + jnp.take(read(self.positions), positions_BS, axis=0, mode="fill")
        return self.norm(x_BSD)

    def first_values(self, x_BSD: jax.Array) -> FirstValues | None:
        """Returns what the layers' own embeddings read, given the stream before the first layer; None without them."""
        if self.layer_norm is None:
            return None
        gain_11P = self.layer_norm.gain(x_BSD)
        return FirstValues(x_BSD, jnp.broadcast_to(gain_11P, (*x_BSD.shape[:2], gain_11P.shape[-1])))

    def lookup(self, tokens_BS: jax.Array) -> jax.Array:
        """Looks up rows of the token table without further operations; a token past the end of the table gives NaN."""
        x_BSD = jnp.take(read(self.tokens), tokens_BS, axis=0, mode="fill")
        return x_BSD if self.tokens_lora is None else x_BSD + self.tokens_lora.rows(tokens_BS)

    def remove_adapter(self) -> None:
        """Makes later calls look up rows of the table alone."""
        self.tokens_lora = None


HeadMatmulFn = Callable[[jax.Array, jax.Array], jax.Array]
"""`matmul(h_MD, w_VD)` returns h w^T, float32 [M, V]."""


def _head_matmul(h_MD: jax.Array, w_VD: jax.Array) -> jax.Array:
    # Sums and results are float32: between 16 and 32, bfloat16 has steps of 1/8, which is too coarse for logits.
    return jnp.matmul(h_MD, w_VD.T, preferred_element_type=jnp.float32)


_HEAD_KEY = 2
"""Number that is folded into the key of a microbatch for the head."""
HeadKey = jax.Array | tuple[jax.Array, jax.Array] | None


class DropoutKeys(NamedTuple):
    """Dropout keys of the parts of the model; None disables dropout."""

    embed: jax.Array | None = None
    """For `Decoder.embed_input`."""
    blocks: jax.Array | None = None
    """For the layers; each layer folds its index into the key."""
    head: HeadKey = None
    """For `Decoder.head_input`; some models use several keys."""


class Decoder(nnx.Module):
    """A decoder-only transformer built from its spec. Parameters are float32 and stacked over layers."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        init = Initializer(rngs, spec.init_std, spec.residual_std)
        self.embed = Embedding(spec, init=init)
        self.blocks = build_blocks(spec, init=init)
        self.final_norm = make_norm(spec.final_norm, {"embed": spec.hidden_dim}, init=init)
        head = {"vocab": spec.vocab_size, "embed": spec.hidden_dim}
        self.head = None if spec.head.tied else init.normal(head)
        self.multi_token = None if spec.multi_token is None else MultiToken(spec, init=init)
        self.head_lora: WeightLora | None = None
        self.head_matmul: HeadMatmulFn = _head_matmul
        self.new_cache: Callable[[tuple[int, int, int, int, int], DTypeLike, int], Any] = KvCache.empty

    def set_head_matmul(self, matmul: HeadMatmulFn) -> None:
        """Makes the head compute its product with `matmul`."""
        self.head_matmul = matmul

    def set_cache(self, kind: type[KvCache | SplitKvCache]) -> None:
        """Makes `init_cache` create caches of this kind."""
        self.new_cache = kind.empty

    def __call__(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array,
        *,
        dtype: DTypeLike = jnp.float32,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Computes logits, float32 [B, S, V]. Arguments as for `hidden`."""
        return self.logits(self.hidden(tokens_BS, positions_BS, segments_BS, dtype=dtype, key=key))

    def hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array,
        *,
        dtype: DTypeLike = jnp.float32,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the inputs of the head, [B, S, D] in `dtype`; arguments as for `hidden_and_stats`."""
        return self.hidden_and_stats(tokens_BS, positions_BS, segments_BS, dtype=dtype, key=key)[0]

    def batch_hidden_and_stats(
        self, batch: Batch, *, dtype: DTypeLike = jnp.float32, key: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStats | None]:
        """Same as `hidden_and_stats` for a batch; passes all fields of the batch that this kind of model reads."""
        tokens_BS, positions_BS, segments_BS = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
        return self.hidden_and_stats(tokens_BS, positions_BS, segments_BS, dtype=dtype, key=key)

    def hidden_and_stats(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array,
        *,
        dtype: DTypeLike = jnp.float32,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterStats | None]:
        """Computes the inputs of the head, [B, S, D] in `dtype`, and the router statistics (None without routers).

        Args:
            tokens_BS: int32 token ids.
            positions_BS: int32; position of each token inside its document.
            segments_BS: int32; a position attends only to itself and earlier positions of its row in the same segment;
                -1 is padding.
            dtype: dtype of activations and of the operands of matrix products.
            key: for dropout; None disables it.
        """
        keys = self.dropout_keys(key)
        ring = uses_ring(self.spec.blocks, dtype, tokens_BS.shape[1])
        # Reordered here and not where rows are sharded: the integers are sent to their ring positions and the final
        # stream is sent back, which is small compared to the keys of a layer. Code that reads a row in order (targets,
        # custom losses) sees the original layout.
        row = tokens_BS, positions_BS, segments_BS
        ordered_tokens_BS, ordered_positions_BS, ordered_segments_BS = map(to_zigzag, row) if ring else row
        x_BSD = self.embed_input(ordered_tokens_BS, ordered_positions_BS, dtype=dtype, key=keys.embed)
        stats = None
        if axis_size("pipeline") > 1:
            x_BSD = run_stages(
                self.spec, self.blocks, x_BSD, ordered_positions_BS, ordered_segments_BS, key=keys.blocks, ring=ring
            )
        else:
            context = make_context(self.spec.blocks, ordered_positions_BS, ordered_segments_BS, ring=ring)
            x_BSD, _, stats = self.run_layers(x_BSD, ordered_tokens_BS, context, key=keys.blocks)
        x_BSD = from_zigzag(x_BSD) if ring else x_BSD
        return self.head_input(x_BSD, tokens_BS, segments_BS, key=keys.head), stats

    def run_layers(
        self,
        x_BSD: jax.Array,
        tokens_BS: jax.Array,
        context: ForwardContext,
        *,
        key: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> Carry:
        """Runs all layers as `run_blocks` does, on the stream before the first one."""
        if (first := self.embed.first_values(x_BSD)) is not None:
            context = context._replace(tokens_BS=tokens_BS, first=first)
        shared = SharedKeys.empty(self.spec.blocks, x_BSD) if cache is None else cache
        return run_blocks(self.spec, self.blocks, x_BSD, context, key=key, cache=shared)

    def dropout_keys(self, key: jax.Array | None) -> DropoutKeys:
        """Derives the dropout keys of the parts of the model from the key of a microbatch; None disables dropout."""
        if key is None:
            return DropoutKeys()
        embed_key, blocks_key = jax.random.split(key)
        head_key = None if self._head_adapter is None else jax.random.fold_in(key, _HEAD_KEY)
        return DropoutKeys(embed_key, blocks_key, head_key)

    def embed_input(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, *, dtype: DTypeLike, key: jax.Array | None
    ) -> jax.Array:
        """Computes the stream before the first layer, [B, S, D] in `dtype`; arguments as for `hidden_and_stats`."""
        # Embeddings are added, scaled and normalized in float32, and rounded to the compute dtype once.
        x_BSD = self.embed(tokens_BS, positions_BS).astype(dtype)
        return dropout(x_BSD, self.spec.embedding.dropout, key)

    def head_input(self, x_BSD: jax.Array, tokens_BS: jax.Array, segments_BS: jax.Array, *, key: HeadKey) -> jax.Array:
        """Computes the inputs of the head from the stream after the last layer, with the final norm."""
        del tokens_BS, segments_BS
        assert not isinstance(key, tuple)
        return self.extend_head_input(self.final_norm(x_BSD), key)

    @property
    def _head_adapter(self) -> WeightLora | None:
        """The adapter of the head; the one of the embedding if both are one table."""
        return self.embed.tokens_lora if self.head is None else self.head_lora

    def extend_head_input(self, h_BSD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Appends the inputs of the head's adapter, if there is one, as further columns."""
        adapter = self._head_adapter
        return h_BSD if adapter is None else adapter.extend_head(h_BSD, tied=self.head is None, key=key)

    def remove_adapter(self) -> None:
        """Makes later calls compute the result of the head alone."""
        self.head_lora = None

    def head_weight(self) -> jax.Array:
        """Returns the matrix w of the head, [V, D] in the parameter dtype; logits are the softcap of h w^T.

        With an adapter, the matrix has further columns, as the inputs of the head do.
        """
        w_VD, adapter = read(self.embed.tokens if self.head is None else self.head), self._head_adapter
        return w_VD if adapter is None else adapter.extend_weight(w_VD, tied=self.head is None)

    def logits(self, h_BSD: jax.Array) -> jax.Array:
        """Computes logits, float32 [B, S, V], from the result of `hidden`; operands are in the dtype of `h_BSD`."""
        w_VD = self.head_weight().astype(h_BSD.dtype)
        h_MD = h_BSD.reshape(-1, h_BSD.shape[-1])
        logits_MV = self.head_matmul(h_MD, w_VD)
        if (cap := self.spec.head.softcap) is not None:
            # The explicit reciprocal is needed because XLA may turn a division into it in one program and not in
            # another.
            logits_MV = cap * jnp.tanh(logits_MV * (1.0 / cap))
        return logits_MV.reshape(*h_BSD.shape[:-1], -1)

    def init_cache(self, batch_size: int, capacity: int, *, dtype: DTypeLike = jnp.float32) -> Any:
        """Makes an empty cache for `batch_size` rows of `capacity` positions; `decode` computes in its dtype."""
        return init_cache(self.spec.blocks, self.new_cache, batch_size, capacity, dtype)

    def decode(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any, counts_B: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Continues from a cache. Returns the logits, float32 [B, T, V], which equal the logits of a full forward pass,
        and the new cache.

        Arguments as for `decode_hidden`.
        """
        h_BTD, cache = self.decode_hidden(tokens_BT, positions_BT, cache, counts_B)
        return self.logits(h_BTD), cache

    def decode_hidden(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any, counts_B: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Computes the hidden states at T more positions of each row, [B, T, D], and the cache that includes their keys
        and values, or the state after them.

        A result at position p is valid if positions 0 to p of its row have been passed in order, in this call or
        earlier ones. Shorter rows are padded on the right with arbitrary tokens at the following positions; the results
        there are meaningless, and a later call overwrites their cache entries.

        Args:
            tokens_BT: int32 token ids.
            positions_BT: int32; position of each token in its row.
            cache: the cache of earlier positions.
            counts_B: int32; number of tokens of each row without padding; None: all. Layers that keep a state need it
                if a later call continues from a padded row.
        """
        x_BTD = self.embed(tokens_BT, positions_BT).astype(cache.dtype)
        context = make_cache_context(self.spec.blocks, positions_BT, cache.capacity, counts_B)
        x_BTD, filled, _ = self.run_layers(x_BTD, tokens_BT, context, cache=cache)
        assert filled is not None
        return self.extend_head_input(self.final_norm(x_BTD)), filled
