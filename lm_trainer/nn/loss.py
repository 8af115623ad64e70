"""Cross-entropy of the next token, whole or in blocks of tokens that never hold all logits at once.

Shape letters: B rows, S positions, N tokens (B x S), C tokens of one block, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.nn.decoder import Decoder
from lm_trainer.parallel.collectives import group_sum


def token_loss(
    model: Decoder,
    batch: Batch,
    *,
    dtype: DTypeLike = jnp.float32,
    key: jax.Array | None = None,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The weighted sum of -log p(target) in nats, the sum of the weights, and other sums with the same weights.

    Float32 scalars; sums, because they add up over microbatches where means do not. The penalties of routers are part
    of the gradient of the loss but not of its value, which so means the same for every model.

    Args:
        model: the decoder.
        batch: the rows; their weights may be any numbers.
        dtype: compute dtype; the loss itself is float32.
        key: for dropout; None switches it off.
        block_size: how many tokens are processed together in the head; None: all. Smaller blocks need less memory
            (`block_size` x V logits at a time); from about 512 on they cost no time.
    """
    h_BSD, stats = model.hidden_and_stats(
        jnp.asarray(batch.tokens), jnp.asarray(batch.positions), jnp.asarray(batch.segments), dtype=dtype, key=key
    )
    weights_N = jnp.asarray(batch.weights).reshape(-1).astype(jnp.float32)
    h_ND = h_BSD.reshape(-1, h_BSD.shape[-1])
    targets_N = jnp.asarray(batch.targets).reshape(-1)
    head = model.spec.head
    loss: jax.Array = weighted_nll(h_ND, model.head_weight(), targets_N, weights_N, block_size, head.softcap)
    weight = jnp.sum(weights_N)
    if stats is None:
        return loss, weight, {}
    tokens = jnp.maximum(group_sum(jnp.sum(jnp.asarray(batch.segments) >= 0)), 1).astype(jnp.float32)
    means = jax.tree.map(lambda share: share * (group_sum(weight) / (model.spec.num_routers * tokens)), stats)
    metrics = {f"router_{name}": jax.lax.stop_gradient(value) for name, value in means._asdict().items()}
    return loss + (means.penalty - jax.lax.stop_gradient(means.penalty)), weight, metrics


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def weighted_nll(
    h_ND: jax.Array,
    w_VD: jax.Array,
    targets_N: jax.Array,
    weights_N: jax.Array,
    block_size: int | None,
    softcap: float | None = None,
) -> jax.Array:
    """sum_n weights[n] * -log softmax(cap(w h[n]))[targets[n]], a float32 scalar; `softcap` as in `HeadSpec`.

    Under differentiation the gradients are made block by block in the forward pass, while the logits are there, so
    that no logits are kept or recomputed; without it nothing but the loss is computed. Products are in the dtype of
    `h_ND` and logits in float32; the gradient of `w_VD` is summed in float32 over the blocks.
    """
    blocks = _in_blocks(h_ND, targets_N, weights_N, block_size)

    def body(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        h_CD, targets_C, weights_C = block
        nll_C = _nll(h_CD, w_VD, targets_C, softcap)[0]
        return total + jnp.sum(weights_C * nll_C), None

    return _fold(body, jnp.zeros((), jnp.float32), blocks, w_VD)[0]


def _nll(
    h_CD: jax.Array, w_VD: jax.Array, targets_C: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The losses, exp(logits - highest), the reciprocal of its row sums, and the slopes of the softcap."""
    logits_CV = jnp.matmul(h_CD, w_VD.astype(h_CD.dtype).T, preferred_element_type=jnp.float32)
    slopes_CV = None
    if softcap is not None:
        bounded_CV = jnp.tanh(logits_CV * (1.0 / softcap))
        logits_CV, slopes_CV = softcap * bounded_CV, 1.0 - jnp.square(bounded_CV)
    highest_C1 = jnp.max(logits_CV, axis=-1, keepdims=True)
    e_CV = jnp.exp(logits_CV - highest_C1)
    sums_C1 = jnp.sum(e_CV, axis=-1, keepdims=True)
    right_C1 = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1, mode="fill")
    return (highest_C1 + jnp.log(sums_C1) - right_C1)[:, 0], e_CV, 1.0 / sums_C1, slopes_CV


@jax.named_scope("loss")
def _forward(
    h_ND: jax.Array,
    w_VD: jax.Array,
    targets_N: jax.Array,
    weights_N: jax.Array,
    block_size: int | None,
    softcap: float | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    n, blocks = h_ND.shape[0], _in_blocks(h_ND, targets_N, weights_N, block_size)
    cast_VD = w_VD.astype(h_ND.dtype)

    def body(carry: tuple[jax.Array, jax.Array], block: Any) -> tuple[Any, Any]:
        total, dw_VD = carry
        h_CD, targets_C, weights_C = block
        nll_C, e_CV, reciprocal_C1, slopes_CV = _nll(h_CD, cast_VD, targets_C, softcap)
        hot_CV = targets_C[:, None] == jnp.arange(w_VD.shape[0])[None, :]
        d_CV = weights_C[:, None] * (e_CV * reciprocal_C1 - hot_CV)
        d_CV = (d_CV if slopes_CV is None else d_CV * slopes_CV).astype(h_CD.dtype)
        dw_VD = dw_VD + jnp.matmul(d_CV.T, h_CD, preferred_element_type=jnp.float32)
        return (total + jnp.sum(weights_C * nll_C), dw_VD), (d_CV @ cast_VD, nll_C)

    zero = (jnp.zeros((), jnp.float32), jnp.zeros(w_VD.shape, jnp.float32))
    (total, dw_VD), (dh, nll) = _fold(body, zero, blocks, w_VD)
    return total, (dh.reshape(-1, h_ND.shape[1])[:n], dw_VD.astype(w_VD.dtype), nll.reshape(-1)[:n])


@jax.named_scope("loss")
def _backward(
    block_size: int | None,
    softcap: float | None,
    residuals: tuple[jax.Array, jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    del block_size, softcap
    dh_ND, dw_VD, nll_N = (r.astype(jnp.float32) * cotangent for r in residuals)
    return dh_ND.astype(residuals[0].dtype), dw_VD.astype(residuals[1].dtype), None, nll_N


weighted_nll.defvjp(_forward, _backward)


def _in_blocks(
    h_ND: jax.Array, targets_N: jax.Array, weights_N: jax.Array, block_size: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens as [blocks, C, ...], filled up with tokens of weight 0."""
    n = h_ND.shape[0]
    size = min(block_size or n, n)
    count = -(-n // size)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.pad(a, [(0, count * size - n)] + [(0, 0)] * (a.ndim - 1)).reshape(count, size, *a.shape[1:])

    return cut(h_ND), cut(targets_N), cut(weights_N)


def _fold(body: Any, zero: Any, blocks: Any, *others: jax.Array) -> Any:
    """`lax.scan`, without a loop for a single block; `others` are the arrays besides `blocks` that `body` reads."""
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        carry, out = body(zero, jax.tree.map(lambda a: a[0], blocks))
        return carry, jax.tree.map(lambda a: a[None], out)
    # Inside a shard_map a loop insists that its start varies over the devices as its end does. A zero that is made
    # from the inputs does, on every version of JAX, and costs nothing.
    inputs = [*jax.tree.leaves(blocks), *others]
    nothing = sum(jnp.where(False, a.reshape(-1)[0], 0).astype(jnp.float32) for a in inputs)
    return jax.lax.scan(body, jax.tree.map(lambda a: a + nothing, zero), blocks)
