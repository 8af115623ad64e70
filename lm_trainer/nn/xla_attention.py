"""Attention in plain XLA, which holds the scores as arrays, for full rows or for blocks of queries.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, H head size, C queries of one block (or of all
query heads that share keys), L blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from lm_trainer.nn.attention_kernel import AttentionInputs
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.spec import AttentionSpec

_MIN_BLOCK_QUERIES, _MAX_BLOCKS = 128, 4
"""Minimum number of queries of a block, and maximum number of blocks of a row. More and smaller blocks would skip
little more and take longer to compile."""


def xla_attention(spec: AttentionSpec, inputs: AttentionInputs, key: jax.Array | None) -> jax.Array:
    """Computes softmax(q k^T + bias) v, [B, S, N, H], with the H and the dtype of `v_BTKH`; `key` is for dropout."""
    q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS, _ = inputs
    scores, queries = spec.scores, q_BSNH.shape[1]
    attention_fn = functools.partial(
        dot_product_attention, dropout_rate=scores.dropout, softcap=scores.softcap, sinks_N=inputs.sinks_N
    )
    if scores.block_size is not None and scores.block_size < queries:
        return _attend_query_blocks(attention_fn, scores.block_size, inputs, key)
    attends_to_itself = segments_BS is not None and queries == k_BTKH.shape[1]
    if not attends_to_itself or queries <= _MIN_BLOCK_QUERIES:
        return attention_fn(q_BSNH, k_BTKH, v_BTKH, bias_BNST, key=key)
    return _attend_causal_blocks(attention_fn, spec.window, inputs, key)


AttentionFn = Callable[..., jax.Array]
"""`dot_product_attention` with its options bound."""


def _attend_causal_blocks(
    attention_fn: AttentionFn, window: int | None, inputs: AttentionInputs, key: jax.Array | None
) -> jax.Array:
    """Processes blocks of queries, each with only the keys that at least one of its queries can see; the bias masks the
    others.
    """
    q_BSNH, k_BTKH, v_BTKH, bias_BNST, *_ = inputs
    length = q_BSNH.shape[1]
    size = max(_MIN_BLOCK_QUERIES, -(-length // _MAX_BLOCKS))

    def attend_blocks() -> Iterator[jax.Array]:
        for index, first in enumerate(range(0, length, size)):
            queries = slice(first, min(first + size, length))
            keys = slice(max(0, first - window + 1) if window else 0, queries.stop)
            arrays = q_BSNH[:, queries], k_BTKH[:, keys], v_BTKH[:, keys], bias_BNST[:, :, queries, keys]
            yield attention_fn(*arrays, key=None if key is None else jax.random.fold_in(key, index))

    return jnp.concatenate(list(attend_blocks()), axis=1)


def _attend_query_blocks(
    attention_fn: AttentionFn, size: int, inputs: AttentionInputs, key: jax.Array | None
) -> jax.Array:
    """Computes the scores of `size` queries at a time, and recomputes them for gradients; same results as unblocked."""
    q_BSNH, k_BTKH, v_BTKH, bias_BNST, *_ = inputs
    length = q_BSNH.shape[1]
    count = -(-length // size)

    def split(x: jax.Array, axis: int) -> jax.Array:
        padding = [(0, count * size - length if a == axis else 0) for a in range(x.ndim)]
        parts = jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    @jax.checkpoint
    def attend_block(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        index, q_BCNH, bias_BNCT = block
        block_key = None if key is None else jax.random.fold_in(key, index)
        return attention_fn(q_BCNH, k_BTKH, v_BTKH, bias_BNCT, key=block_key)

    # Queries that pad the last block have a bias of 0, so that their softmax is finite. They are removed at the end.
    o_LBCNH = jax.lax.map(attend_block, (jnp.arange(count), split(q_BSNH, 1), split(bias_BNST, 2)))
    o_BLCNH = jnp.moveaxis(o_LBCNH, 0, 1)
    return o_BLCNH.reshape(q_BSNH.shape[0], count * size, *o_BLCNH.shape[3:])[:, :length]


def dot_product_attention(  # noqa: PLR0913 - the arguments of attention
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    bias_BNST: jax.Array,
    *,
    dropout_rate: float = 0.0,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(softcap(q k^T) + bias) v, with scores in the dtype of q and the softmax in float32.
    Differentiable with respect to q, k, v and the sinks, which join the scores of each query in the softmax.
    """
    scores_BNST = _multiply_groups("bkch,bkth->bkct", _swap_heads_first(q_BSNH), k_BTKH).astype(jnp.float32)
    if softcap is not None:
        scores_BNST = softcap * jnp.tanh(scores_BNST * (1.0 / softcap))
    scores_BNST = scores_BNST + bias_BNST
    # The result of the softmax does not depend on the subtracted value, so omitting its gradient loses no accuracy.
    highest = jax.lax.stop_gradient(jnp.max(scores_BNST, axis=-1, keepdims=True))
    sinks_1N11 = None if sinks_N is None else sinks_N.astype(jnp.float32)[None, :, None, None]
    if sinks_1N11 is not None:
        highest = jnp.maximum(highest, jax.lax.stop_gradient(sinks_1N11))
    e_BNST = jnp.exp(scores_BNST - highest)
    sums_BNS1 = jnp.sum(e_BNST, axis=-1, keepdims=True)
    if sinks_1N11 is not None:
        sums_BNS1 = sums_BNS1 + jnp.exp(sinks_1N11 - highest)
    # Divides the result, because the probabilities have T / H times as many elements. The explicit reciprocal is needed
    # because a compiler may turn a division into a reciprocal in one program and not in another.
    r_BNS1 = 1.0 / sums_BNS1
    # Dropout after the sum, because dropout of the probabilities would not change the sum either.
    e_BNST = dropout(e_BNST, dropout_rate, key).astype(v_BTKH.dtype)
    o_BNSH = _multiply_groups("bkct,bkth->bkch", e_BNST, v_BTKH) * r_BNS1.astype(v_BTKH.dtype)
    return _swap_heads_first(o_BNSH)


def _swap_heads_first(x: jax.Array) -> jax.Array:
    """Swaps the axes of positions and heads. With heads first, neither scores nor their gradients are transposed."""
    return x.swapaxes(1, 2)


def _multiply_groups(product: str, x_BNSX: jax.Array, y_BTKH: jax.Array) -> jax.Array:
    """Multiplies each head with the matrix of its group, [B, N, S, ...], as one product for all heads of a group."""
    rows, heads, queries, size = x_BNSX.shape
    x_BKCX = x_BNSX.reshape(rows, y_BTKH.shape[2], -1, size)
    return jnp.einsum(product, x_BKCX, _swap_heads_first(y_BTKH)).reshape(rows, heads, queries, -1)
