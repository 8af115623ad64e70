"""Self-attention and its masks.

Shape letters: B rows, S queries, T keys, D hidden dimension, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.nn.attention_dispatch import dispatch_attention
from lm_trainer.nn.attention_kernel import MASK_VALUE
from lm_trainer.nn.cache import KvCache, LayerCache, SizedKvCache, StateCache
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.largest_logits import largest_logits, report_largest
from lm_trainer.nn.layer_values import FirstValues, SharedKeys
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.measured import MeasuredParam
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.positions import alibi_bias, apply_rope
from lm_trainer.nn.read import read
from lm_trainer.nn.ring_attention import RowMetadata, ring_attention
from lm_trainer.nn.rope_spec import RopeSpec
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec, BlockSpec, PositionScaleSpec, QkNormSpec
from lm_trainer.parallel.collectives import all_gather, axis_index, axis_size


class Reach(NamedTuple):
    """Limits of the positions that a query attends to; 0: no limit."""

    window: int = 0
    """Number of positions, including its own."""
    chunk: int = 0
    """As `AttentionSpec.chunk`."""

    @classmethod
    def from_spec(cls, spec: AttentionSpec) -> Reach:
        """Returns the limits of an attention."""
        return cls(spec.window or 0, spec.chunk or 0)

    def split_segments(self, segments_BS: jax.Array, positions_BS: jax.Array, length: int) -> jax.Array:
        """Returns a number for each chunk of each segment; the numbers of padding stay negative.

        Args:
            segments_BS: int32; the documents of a row.
            positions_BS: int32; positions inside documents.
            length: number of positions of a full row.
        """
        if not self.chunk:
            return segments_BS
        chunks_of_row = -(-length // self.chunk)
        return segments_BS * chunks_of_row + positions_BS // self.chunk


UNLIMITED = Reach()
"""All earlier positions."""


class ForwardContext(NamedTuple):
    """Arrays shared by all layers of one forward pass."""

    positions_BS: jax.Array
    """int32; position of each query inside its document."""
    key_positions_BT: jax.Array
    """int32; positions of the keys."""
    biases_B1ST: Mapping[Reach, jax.Array]
    """float32; added to the scores: 0 or `MASK_VALUE`. One array per distinct reach of the layers; empty with ring
    attention."""
    valid_BS: jax.Array
    """bool, false for padding."""
    segments_BS: jax.Array | None = None
    """int32; the documents of the row; None with a KV cache."""
    key_segments_BT: jax.Array | None = None
    """int32, segments of the keys, from which ring attention builds its masks block by block; None for other
    backends."""
    memory: jax.Array | KvCache | None = None
    """The encoder output that cross-attention attends to, [B, F, D], or its keys and values for all layers."""
    tokens_BS: jax.Array | None = None
    """int32 token ids, for layers with embeddings of their own; None without such layers."""
    first: FirstValues | None = None
    """Values that the embeddings of all layers read; None without such layers."""


def unique_reaches(blocks: tuple[BlockSpec, ...]) -> list[Reach]:
    """Returns the distinct reaches of all layers with attention."""
    return sorted({Reach.from_spec(spec) for spec in softmax_specs(blocks)})


def make_context(
    blocks: tuple[BlockSpec, ...], positions_BS: jax.Array, segments_BS: jax.Array, *, ring: bool = False
) -> ForwardContext:
    """Builds the context for self-attention within rows; with `ring`, positions have the order of `ring_attention`."""
    key_positions_BT = all_gather(positions_BS, "context", 1)
    if ring:
        # Gathering two integers per position is cheap compared to gathering the keys, which ring attention avoids.
        key_segments_BT = all_gather(segments_BS, "context", 1)
        return ForwardContext(positions_BS, key_positions_BT, {}, segments_BS >= 0, segments_BS, key_segments_BT)
    length = key_positions_BT.shape[1]
    biases = {
        reach: causal_bias(reach.split_segments(segments_BS, positions_BS, length), reach.window)
        for reach in unique_reaches(blocks)
    }
    return ForwardContext(positions_BS, key_positions_BT, biases, segments_BS >= 0, segments_BS)


def make_cache_context(
    blocks: tuple[BlockSpec, ...], positions_BT: jax.Array, capacity: int, counts_B: jax.Array | None = None
) -> ForwardContext:
    """Builds the context for new positions that attend to a cache, which already includes them.

    `counts_B` is the number of new positions of each row that count; None: all.
    """
    slots_1C = jnp.arange(capacity, dtype=jnp.int32)[None]
    biases = {reach: cache_bias(positions_BT, capacity, reach) for reach in unique_reaches(blocks)}
    valid_BT = jnp.ones(positions_BT.shape, bool)
    if counts_B is not None:
        valid_BT = jnp.arange(positions_BT.shape[1])[None] < counts_B[:, None]
    return ForwardContext(positions_BT, slots_1C, biases, valid_BT)


def causal_bias(segments_BS: jax.Array, window: int = 0) -> jax.Array:
    """Returns float32 [B, 1, S, T]: a query attends to itself and the earlier positions of its row in the same segment.

    T equals S, or the length of the full row if the positions of a row are sharded over devices.
    """
    segments_BT = all_gather(segments_BS, "context", 1)
    query_S = key_T = jnp.arange(segments_BT.shape[1])
    if axis_size("context") > 1:
        # Positions in the full row, because the key positions are too.
        query_S = axis_index("context") * segments_BS.shape[1] + jnp.arange(segments_BS.shape[1])
    allowed_BST = (query_S[None, :, None] >= key_T[None, None, :]) & (
        segments_BS[:, :, None] == segments_BT[:, None, :]
    )
    if window:
        allowed_BST = allowed_BST & (query_S[None, :, None] - key_T[None, None, :] < window)
    return _mask_to_bias(allowed_BST)


def cache_bias(positions_BT: jax.Array, capacity: int, reach: Reach = UNLIMITED) -> jax.Array:
    """Returns float32 [B, 1, T, C]: a query at position p attends to slots 0 to p (inclusive) of its row's cache."""
    slots_C = jnp.arange(capacity)[None, None, :]
    allowed_BTC = slots_C <= positions_BT[:, :, None]
    if reach.window:
        allowed_BTC = allowed_BTC & (positions_BT[:, :, None] - slots_C < reach.window)
    if reach.chunk:
        allowed_BTC = allowed_BTC & (positions_BT[:, :, None] // reach.chunk == slots_C // reach.chunk)
    return _mask_to_bias(allowed_BTC)


def _mask_to_bias(allowed_BST: jax.Array) -> jax.Array:
    return jnp.where(allowed_BST, 0.0, MASK_VALUE).astype(jnp.float32)[:, None]


def attend(  # noqa: PLR0913 - the arguments of attention
    spec: AttentionSpec,
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    context: ForwardContext,
    layer: jax.Array | int,
    *,
    sinks_N: jax.Array | None = None,
    key: jax.Array | None = None,
    measured: MeasuredParam | None = None,
) -> jax.Array:
    """Computes attention of projected queries, keys and values, [B, S, N, H] in the dtype of the values.

    Args:
        spec: the attention spec.
        q_BSNH: queries, not yet scaled.
        k_BTKH: keys.
        v_BTKH: values.
        context: arrays shared by all layers, including the mask.
        layer: index of the layer.
        sinks_N: logits of the sinks, if the spec has sinks.
        key: for dropout of the probabilities; None disables it.
        measured: parameter whose gradient is the largest logit of each head; None: it is not measured.
    """
    # Cast before the product, because scores of 16-bit operands are rounded to 16 bits before the softmax.
    if spec.scores.upcast:
        q_BSNH, k_BTKH = q_BSNH.astype(jnp.float32), k_BTKH.astype(jnp.float32)
    # Scales the queries because the scores have T / H times as many elements, and because kernels expect scaled
    # queries.
    q_BSNH = q_BSNH * _score_scale(spec, layer, q_BSNH.dtype)
    if (position_scale := spec.scores.position_scale) is not None:
        q_BSNH = q_BSNH * _scale_of_positions(position_scale, context.positions_BS).astype(q_BSNH.dtype)
    if measured is not None:
        q_BSNH = _report_largest_logits(measured, spec, q_BSNH, k_BTKH, context)
    reach, length = Reach.from_spec(spec), context.key_positions_BT.shape[1]
    segments_BS = context.segments_BS
    if segments_BS is not None:
        segments_BS = reach.split_segments(segments_BS, context.positions_BS, length)
    if segments_BS is not None and context.key_segments_BT is not None:
        key_segments_BT = reach.split_segments(context.key_segments_BT, context.key_positions_BT, length)
        row = RowMetadata(segments_BS, key_segments_BT, context.positions_BS, context.key_positions_BT)
        return ring_attention(spec, q_BSNH, k_BTKH, v_BTKH, row, key, sinks_N=sinks_N)
    bias_BNST = _layer_bias(spec, context)
    return dispatch_attention(
        spec, q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS=segments_BS, sinks_N=sinks_N, key=key
    )


def _report_largest_logits(
    measured: MeasuredParam, spec: AttentionSpec, q_BSNH: jax.Array, k_BTKH: jax.Array, context: ForwardContext
) -> jax.Array:
    """Returns the queries, with the largest logit of each head as the gradient of `measured`."""
    if context.key_segments_BT is not None:
        raise UserError(
            "optimizer.qk_clip needs the logits of all pairs, and attn_backend: ring holds only parts of the keys of a "
            "row; write another backend"
        )
    q, k = jax.lax.stop_gradient((q_BSNH, all_gather(k_BTKH, "context", 1)))
    bias_B1ST = context.biases_B1ST[Reach.from_spec(spec)]
    return report_largest(read(measured), q_BSNH, largest_logits(q, k, bias_B1ST, context.valid_BS))


def _layer_bias(spec: AttentionSpec, context: ForwardContext) -> jax.Array:
    bias_B1ST = context.biases_B1ST[Reach.from_spec(spec)]
    if not isinstance(spec.positions, AlibiSpec):
        return bias_B1ST
    distances_BST = context.positions_BS[:, :, None] - context.key_positions_BT[:, None, :]
    return bias_B1ST + alibi_bias(spec.positions, spec.num_heads, distances_BST)


def _score_scale(spec: AttentionSpec, layer: jax.Array | int, dtype: DTypeLike) -> jax.Array:
    scores = spec.scores
    scale = jnp.float32(spec.head_dim**-0.5 if scores.scale is None else scores.scale)
    if scores.inverse_layer:
        # An array, because the layer index is traced if the layers run as a loop.
        scale = scale / (jnp.asarray(layer, jnp.float32) + 1.0)
    return scale.astype(dtype)


def _scale_of_positions(spec: PositionScaleSpec, positions_BS: jax.Array) -> jax.Array:
    intervals_BS = ((positions_BS + 1) // spec.interval).astype(jnp.float32)
    return (1.0 + spec.rate * jnp.log1p(intervals_BS))[:, :, None, None]


class QkNorm(nnx.Module):
    """Normalization of queries or keys."""

    def __init__(self, spec: QkNormSpec, heads: Mapping[str, int], *, init: Initializer):
        (axis, count), (_, size) = heads.items()
        self.joint = spec.over == "heads"
        self.norm = make_norm(spec.norm, {axis: count * size} if self.joint else {"head_size": size}, init=init)

    def __call__(self, x_BSNH: jax.Array) -> jax.Array:
        if not self.joint:
            return self.norm(x_BSNH)
        return self.norm(x_BSNH.reshape(*x_BSNH.shape[:2], -1)).reshape(x_BSNH.shape)


class Attention(nnx.Module):
    """Multi-head self-attention (Vaswani et al. 2017)."""

    def __init__(self, spec: AttentionSpec, dim: int, *, init: Initializer):
        self.spec = spec
        heads = {"heads": spec.num_heads, "head_size": spec.head_dim}
        grouped = spec.kv_heads != spec.num_heads
        kv_heads = {"kv_heads" if grouped else "heads": spec.kv_heads, "head_size": spec.head_dim}
        self.q = Linear({"embed": dim}, heads, bias=spec.bias, init=init)
        key_bias, has_values = spec.bias and spec.key_bias, spec.has_keys and not spec.values_are_keys
        self.k = Linear({"embed": dim}, kv_heads, bias=key_bias, init=init) if spec.has_keys else None
        self.v = Linear({"embed": dim}, kv_heads, bias=spec.bias, init=init) if has_values else None
        self.out = Linear(heads, {"embed": dim}, bias=spec.out_bias, init=init, residual=True)
        self.gate = Linear({"embed": dim}, heads, bias=spec.bias, init=init) if spec.gated else None
        self.q_norm = None if spec.qk_norm is None else QkNorm(spec.qk_norm, heads, init=init)
        self.k_norm = QkNorm(spec.qk_norm, kv_heads, init=init) if spec.has_keys and spec.qk_norm is not None else None
        self.v_norm = make_norm(spec.value_norm if spec.has_keys else None, {"head_size": spec.head_dim}, init=init)
        self.sinks = init.constant({"heads": spec.num_heads}, 0.0) if spec.sinks else None
        self.largest_logits: MeasuredParam | None = None

    def __call__(
        self,
        x_BSD: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        adapter_key: jax.Array | None = None,
        cache: LayerCache | SharedKeys | None = None,
    ) -> tuple[jax.Array, LayerCache | SharedKeys | None]:
        """Attends within `x_BSD` or, with a cache, to all positions in the cache, which include `x_BSD`.

        `key` is for dropout of the probabilities, `adapter_key` for dropout in adapters.
        """
        sharing = self.spec.sharing
        if sharing is not None and not sharing.has_keys:
            assert isinstance(cache, SharedKeys | KvCache | SizedKvCache | StateCache)
            q_BSNH = self._project_queries(x_BSD, context.positions_BS, adapter_key)
            sizes = self.spec.kv_heads, self.spec.head_dim, self.spec.value_size
            k_BTKH, v_BTKH = cache.read(sharing.layer, sizes)
        else:
            q_BSNH, k_BTKH, v_BTKH = self._project_qkv(x_BSD, context.positions_BS, adapter_key)
            if isinstance(cache, SharedKeys):
                cache = cache if sharing is None else cache.write(sharing.layer, k_BTKH, v_BTKH)
            elif cache is not None:
                cache, k_BTKH, v_BTKH = cache.write(layer, context.positions_BS, k_BTKH, v_BTKH)
        sinks_N = None if self.sinks is None else read(self.sinks, jnp.float32)
        o_BSNH = attend(
            self.spec, q_BSNH, k_BTKH, v_BTKH, context, layer, sinks_N=sinks_N, key=key, measured=self.largest_logits
        )
        if self.gate is not None:
            o_BSNH = o_BSNH * jax.nn.sigmoid(self.gate(x_BSD, key=adapter_key))
        return self.out(o_BSNH, key=adapter_key), cache

    def _project_queries(self, x_BSD: jax.Array, positions_BS: jax.Array, key: jax.Array | None) -> jax.Array:
        q_BSNH = self.q(x_BSD, key=key)
        if self.q_norm is not None:
            q_BSNH = self.q_norm(q_BSNH)
        if (limit := self.spec.clip) is not None:
            q_BSNH = jnp.clip(q_BSNH, -limit, limit)
        if isinstance(self.spec.positions, RopeSpec):
            q_BSNH = apply_rope(self.spec.positions, q_BSNH, positions_BS)
        return q_BSNH

    def _project_qkv(
        self, x_BSD: jax.Array, positions_BS: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        assert self.k is not None
        q_BSNH, k_BSKH = self.q(x_BSD, key=key), self.k(x_BSD, key=key)
        v_BSKH = self.v_norm(k_BSKH if self.v is None else self.v(x_BSD, key=key))
        # Norms before rotations: a norm has a different gain for each of the two dimensions that a rotation mixes.
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNH, k_BSKH = self.q_norm(q_BSNH), self.k_norm(k_BSKH)
        if (limit := self.spec.clip) is not None:
            q_BSNH, k_BSKH, v_BSKH = (jnp.clip(x, -limit, limit) for x in (q_BSNH, k_BSKH, v_BSKH))
        if isinstance(self.spec.positions, RopeSpec):
            q_BSNH = apply_rope(self.spec.positions, q_BSNH, positions_BS)
            k_BSKH = apply_rope(self.spec.positions, k_BSKH, positions_BS)
        return q_BSNH, k_BSKH, v_BSKH
