"""The decoder that all families share.

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
from lm_trainer.nn.attention import make_cache_context, make_context
from lm_trainer.nn.attention_dispatch import uses_ring
from lm_trainer.nn.cache import KvCache, SplitKvCache
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.moe import RouterStats
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.pipeline import run_stages
from lm_trainer.nn.read import read
from lm_trainer.nn.ring_layout import from_zigzag, to_zigzag
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stack import build_blocks, run_blocks
from lm_trainer.parallel.collectives import axis_size


class Embedding(nnx.Module):
    """The token table, and the way of its rows to the first layer."""

    def __init__(self, spec: DecoderSpec, *, init: Initializer):
        self.spec = spec.embedding
        self.tokens = init.normal({"vocab": spec.vocab_size, "embed": spec.hidden_dim})
        learned = {"position": spec.num_positions, "embed": spec.hidden_dim}
        self.positions = init.normal(learned) if self.spec.learned_positions else None
        self.norm = make_norm(self.spec.norm, {"embed": spec.hidden_dim}, init=init)

    @jax.named_scope("embedding")
    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """float32 [B, S, D]; NaN for a token or position past its table, which indexing would silently clamp."""
        x_BSD = self.lookup(tokens_BS)
        if self.spec.scale is not None:
            x_BSD = x_BSD * self.spec.scale
        if self.positions is not None:
            x_BSD = x_BSD + jnp.take(read(self.positions), positions_BS, axis=0, mode="fill")
        return self.norm(x_BSD)

    def lookup(self, tokens_BS: jax.Array) -> jax.Array:
        """The rows of the token table alone; NaN for a token past its end."""
        return jnp.take(read(self.tokens), tokens_BS, axis=0, mode="fill")


HeadMatmulFn = Callable[[jax.Array, jax.Array], jax.Array]
"""`matmul(h_MD, w_VD)` returns h w^T, float32 [M, V]."""


def _head_matmul(h_MD: jax.Array, w_VD: jax.Array) -> jax.Array:
    # Sums and results in float32: between 16 and 32, bfloat16 has steps of 1/8, too coarse for logits.
    return jnp.matmul(h_MD, w_VD.T, preferred_element_type=jnp.float32)


class PartKeys(NamedTuple):
    """Keys of dropout; None switches it off."""

    enter: jax.Array | None = None
    """The key of `Decoder.enter`."""
    blocks: jax.Array | None = None
    """The key of the layers, which fold their number into it."""
    leave: Any = None
    """The key of `Decoder.leave`; for some models several."""


class Decoder(nnx.Module):
    """A decoder-only transformer, built from its spec. Parameters are float32 and stacked over layers."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        self.spec = spec
        init = Initializer(rngs, spec.init_std, spec.residual_std)
        self.embed = Embedding(spec, init=init)
        self.blocks = build_blocks(spec, init=init)
        self.final_norm = make_norm(spec.final_norm, {"embed": spec.hidden_dim}, init=init)
        head = {"vocab": spec.vocab_size, "embed": spec.hidden_dim}
        self.head = None if spec.head.tied else init.normal(head)
        self.head_matmul: HeadMatmulFn = _head_matmul
        self.new_cache: Callable[[tuple[int, int, int, int, int], DTypeLike], Any] = KvCache.empty

    def set_head_matmul(self, matmul: HeadMatmulFn) -> None:
        """Computes the product of the head by `matmul` from now on."""
        self.head_matmul = matmul

    def set_cache(self, kind: type[KvCache | SplitKvCache]) -> None:
        """Keeps keys and values in a cache of this kind from now on."""
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
        """Logits, float32 [B, S, V]. Arguments as for `hidden`."""
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
        """The hidden states that the head reads, [B, S, D] in `dtype`; arguments as for `hidden_and_stats`."""
        return self.hidden_and_stats(tokens_BS, positions_BS, segments_BS, dtype=dtype, key=key)[0]

    def hidden_of(
        self, batch: Batch, *, dtype: DTypeLike = jnp.float32, key: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStats | None]:
        """`hidden_and_stats` of the rows of a batch: of all that this kind of model reads of it."""
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
        """The hidden states that the head reads, [B, S, D] in `dtype`, and the statistics of routers, None without any.

        Args:
            tokens_BS: int32.
            positions_BS: int32, position inside the document.
            segments_BS: int32; a position attends only to earlier ones of its row in the same segment; -1 is padding.
            dtype: of activations and of the operands of matrix products.
            key: for dropout; None switches it off.
        """
        keys = self.part_keys(key)
        ring = uses_ring(self.spec.blocks, dtype, tokens_BS.shape[1])
        # Here and not where rows are cut: integers go to their places and one stream comes back, which is little beside
        # the keys of a layer, and what reads a row in its order (targets, losses of one's own) finds it as it was.
        row = tokens_BS, positions_BS, segments_BS
        inner_BS, at_BS, of_BS = map(to_zigzag, row) if ring else row
        x_BSD = self.enter(inner_BS, at_BS, dtype=dtype, key=keys.enter)
        stats = None
        if axis_size("pipeline") > 1:
            x_BSD = run_stages(self.spec, self.blocks, x_BSD, at_BS, of_BS, key=keys.blocks, ring=ring)
        else:
            context = make_context(self.spec.blocks, at_BS, of_BS, ring=ring)
            x_BSD, _, stats = run_blocks(self.spec, self.blocks, x_BSD, context, key=keys.blocks)
        x_BSD = from_zigzag(x_BSD) if ring else x_BSD
        return self.leave(x_BSD, tokens_BS, segments_BS, key=keys.leave), stats

    def part_keys(self, key: jax.Array | None) -> PartKeys:
        """The keys of dropout in the parts of the model, from that of a microbatch; None switches it off."""
        if key is None:
            return PartKeys()
        enter, blocks = jax.random.split(key)
        return PartKeys(enter, blocks)

    def enter(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, *, dtype: DTypeLike, key: jax.Array | None
    ) -> jax.Array:
        """The stream before the first layer, [B, S, D] in `dtype`; arguments as for `hidden_and_stats`."""
        # Embeddings are added, scaled and normalized in float32, and rounded to the compute dtype once.
        x_BSD = self.embed(tokens_BS, positions_BS).astype(dtype)
        return dropout(x_BSD, self.spec.embedding.dropout, key)

    def leave(self, x_BSD: jax.Array, tokens_BS: jax.Array, segments_BS: jax.Array, *, key: Any) -> jax.Array:
        """The hidden states that the head reads, from the stream after the last layer."""
        del tokens_BS, segments_BS, key
        return self.final_norm(x_BSD)

    def head_weight(self) -> jax.Array:
        """The matrix of the head, [V, D] in the parameter dtype: logits are the head's softcap of h w^T."""
        return read(self.embed.tokens if self.head is None else self.head)

    def logits(self, h_BSD: jax.Array) -> jax.Array:
        """The head: float32 [B, S, V] from what `hidden` returns; the product is in the dtype of `h_BSD`."""
        w_VD = self.head_weight().astype(h_BSD.dtype)
        h_MD = h_BSD.reshape(-1, h_BSD.shape[-1])
        logits_MV = self.head_matmul(h_MD, w_VD)
        if (most := self.spec.head.softcap) is not None:
            # The reciprocal is written out because XLA may turn a division into it in one program and not in another.
            logits_MV = most * jnp.tanh(logits_MV * (1.0 / most))
        return logits_MV.reshape(*h_BSD.shape[:-1], -1)

    def init_cache(self, batch_size: int, capacity: int, *, dtype: DTypeLike = jnp.float32) -> KvCache:
        """An empty cache of `capacity` positions for each of `batch_size` rows; `decode` computes in its dtype."""
        attention = self.spec.blocks[0].attention
        # One array for all layers: their heads agree in number and size, whatever else differs between them.
        shape = (len(self.spec.blocks), batch_size, capacity, attention.kv_heads, attention.head_dim)
        return self.new_cache(shape, dtype)

    def decode(self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: KvCache) -> tuple[jax.Array, KvCache]:
        """Goes on from a cache with the numbers of a full forward pass: logits, float32 [B, T, V], and the new cache.

        Arguments as for `decode_hidden`.
        """
        h_BTD, cache = self.decode_hidden(tokens_BT, positions_BT, cache)
        return self.logits(h_BTD), cache

    def decode_hidden(self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: KvCache) -> tuple[jax.Array, KvCache]:
        """The hidden states at T more positions of each row, [B, T, D], and the cache with their keys and values.

        A result at position p is right when positions 0 to p of its row were given in order, here or before. Shorter
        rows are filled up on the right with any tokens at the positions that follow; what is returned there means
        nothing, and a later call overwrites what they left in the cache.
        """
        x_BTD = self.embed(tokens_BT, positions_BT).astype(cache.dtype)
        context = make_cache_context(self.spec.blocks, positions_BT, cache.capacity)
        x_BTD, filled, _ = run_blocks(self.spec, self.blocks, x_BTD, context, cache=cache)
        assert filled is not None
        return self.final_norm(x_BTD), filled
