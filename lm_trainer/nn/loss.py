"""Cross-entropy of the next token, computed at once or in blocks of tokens, so that the logits of all tokens never
exist together.

Shape letters: B rows, S positions, N tokens (B x S), C tokens of one block, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.router import RouterStats
from lm_trainer.parallel.collectives import gather_on_first_device, group_sum, num_batch_parts

Carry = TypeVar("Carry")
Out = TypeVar("Out")
_Block = tuple[jax.Array, jax.Array, jax.Array]
"""Hidden states [C, D], targets [C] and weights [C] of a block, or of all blocks with a leading axis over blocks."""


class LossTerms(NamedTuple):
    """Terms computed from the logits in addition to the cross-entropy."""

    z_loss_weight: float = 0.0
    """Weight of the penalty that keeps the normalizer of the softmax near 1; 0: no penalty."""
    entropy: bool = False
    """Also compute the sum of the entropies of the predicted distributions."""


CROSS_ENTROPY = LossTerms()
"""Only the cross-entropy, without further terms."""


class TokenSums(NamedTuple):
    """Weighted sums over tokens: float32 scalars, None for terms not requested by `LossTerms`."""

    nll: jax.Array
    """-log p(target), in nats."""
    z_loss: jax.Array | None = None
    """z_loss_weight * (log Z)^2, Z the sum of exp(logits): PaLM (Chowdhery et al. 2022, arXiv 2204.02311), part 5."""
    entropy: jax.Array | None = None
    """-sum_v p(v) log p(v), in nats."""


def token_loss(
    model: Decoder,
    batch: Batch,
    *,
    dtype: DTypeLike = jnp.float32,
    key: jax.Array | None = None,
    block_size: int | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the weighted sum of -log p(target) in nats, the sum of the weights, and further sums with the same
    weights.

    All are float32 scalars. They are sums, because sums add up over microbatches and means do not. The penalties of
    routers, the z-loss and the losses of later tokens contribute to the gradient of the loss but not to its value, so
    the value has the same meaning for every model.

    Args:
        model: the decoder.
        batch: the rows; their weights may be arbitrary numbers.
        dtype: compute dtype; the loss itself is float32.
        key: for dropout; None disables it.
        block_size: number of tokens that the head processes together; None: all. Smaller blocks need less memory
            (`block_size` x V logits at a time). Blocks of about 512 tokens or more cost no time.
        terms: terms to compute from the logits in addition; `z_loss` and `entropy` are then among the further sums.
    """
    h_BSD, stats = model.batch_hidden_and_stats(batch, dtype=dtype, key=key)
    return loss_after_layers(model, h_BSD, stats, batch, block_size=block_size, terms=terms)


def loss_after_layers(
    model: Decoder,
    h_BSD: jax.Array,
    stats: RouterStats | None,
    batch: Batch,
    *,
    block_size: int | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Same as `token_loss`, but computed from the results of `Decoder.hidden_and_stats`.

    If the model predicts later tokens, `mtp_loss` is the sum of the mean loss of its modules (arXiv 2412.19437,
    equations 24 and 25, without the factor). Its weighted value contributes to the gradient of the loss but not to its
    value.
    """
    if (modules := model.multi_token) is None:
        return hidden_loss(model, h_BSD, stats, batch, block_size=block_size, terms=terms)
    spec, settings = modules.modules_spec, _Settings(block_size, model.spec.head.softcap, parts=num_batch_parts())
    later = jnp.zeros((), jnp.float32)
    # Without the columns that an adapter of the head appends.
    for rows, later_BSD, later_stats in modules(model.embed, h_BSD[..., : model.spec.hidden_dim], stats, batch):
        h_ND = model.extend_head_input(later_BSD).reshape(-1, h_BSD.shape[-1])
        targets_N, weights_N = rows.targets_BS.reshape(-1), rows.weights_BS.reshape(-1)
        later_sums: TokenSums = _token_sums(h_ND, model.head_weight(), targets_N, weights_N, settings)
        later, stats = later + later_sums.nll * (1.0 / spec.depth), later_stats
    loss, weight, metrics = hidden_loss(model, h_BSD, stats, batch, block_size=block_size, terms=terms)
    weighted = spec.loss_weight * later
    metrics["mtp_loss"] = jax.lax.stop_gradient(later)
    return loss + (weighted - jax.lax.stop_gradient(weighted)), weight, metrics


def hidden_loss(
    model: Decoder,
    h_BSD: jax.Array,
    stats: RouterStats | None,
    batch: Batch,
    *,
    block_size: int | None = None,
    terms: LossTerms = CROSS_ENTROPY,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Same as `loss_after_layers`, without the prediction of later tokens."""
    weights_N = jnp.asarray(batch.weights).reshape(-1).astype(jnp.float32)
    h_ND = h_BSD.reshape(-1, h_BSD.shape[-1])
    targets_N = jnp.asarray(batch.targets).reshape(-1)
    settings = _Settings(block_size, model.spec.head.softcap, terms, num_batch_parts())
    sums_of_terms: TokenSums = _token_sums(h_ND, model.head_weight(), targets_N, weights_N, settings)
    loss, *other_terms = sums_of_terms
    weight = jnp.sum(weights_N)
    sums = zip(TokenSums._fields[1:], other_terms, strict=True)
    metrics = {name: jax.lax.stop_gradient(value) for name, value in sums if value is not None}
    loss, router_metrics = add_router_terms(model, loss, weight, stats, batch)
    return loss, weight, metrics | router_metrics


def add_router_terms(
    model: Decoder, loss: jax.Array, weight: jax.Array, stats: RouterStats | None, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Adds the penalties of routers to the gradient of a loss, but not to its value.

    Args:
        model: the decoder.
        loss: sum of the losses of the microbatch.
        weight: sum of the weights of the microbatch.
        stats: router statistics of the microbatch; None without routers.
        batch: rows of the microbatch.

    Returns:
        The loss, and sums of the router metrics.
    """
    if stats is None:
        return loss, {}
    # Means over layers and tokens, times the weight of the microbatch, so they add up over microbatches as losses do.
    tokens = jnp.maximum(group_sum(jnp.sum(jnp.asarray(batch.segments) >= 0)), 1).astype(jnp.float32)
    means = jax.tree.map(lambda share: share * (group_sum(weight) / (model.spec.num_routers * tokens)), stats)
    metrics = {f"router_{name}": jax.lax.stop_gradient(value) for name, value in means._asdict().items()}
    # Adds 0 to the value of the loss, and the gradient of the penalty to its gradient.
    return loss + (means.penalty - jax.lax.stop_gradient(means.penalty)), metrics


def token_nll(
    model: Decoder, batch: Batch, *, dtype: DTypeLike = jnp.float32, block_size: int | None = None, top: int = 0
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Same as `token_loss` without dropout; the further results are float32 values per position, [B, S].

    `nll` is -log p(target). With `top`, `rank` is the number of tokens that are more likely than the target, and
    `top_ids` and `top_nll`, [B, S, top], are the most likely tokens and their -log p. If devices share a microbatch,
    one of them returns the values of all positions in these arrays, and the others return zeros.
    """
    h_BSD, _ = model.batch_hidden_and_stats(batch, dtype=dtype)
    return hidden_nll(model, h_BSD, batch, block_size=block_size, top=top)


def hidden_nll(
    model: Decoder, h_BSD: jax.Array, batch: Batch, *, block_size: int | None = None, top: int = 0
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Same as `token_nll`, but computed from the result of `Decoder.hidden`."""
    settings = _Settings(block_size, model.spec.head.softcap, parts=num_batch_parts())
    h_ND, targets_N = h_BSD.reshape(-1, h_BSD.shape[-1]), jnp.asarray(batch.targets).reshape(-1)
    blocks, w_VD = _split_blocks(h_ND, targets_N, targets_N, settings), model.head_weight()

    def body(carry: tuple[()], block: _Block) -> tuple[tuple[()], dict[str, jax.Array]]:
        h_CD, targets_C, _ = block
        softmax = _softmax(h_CD, w_VD, targets_C, settings.softcap)
        values = {"nll": softmax.token_terms(CROSS_ENTROPY).nll}
        return carry, values | (softmax.top_tokens(targets_C, top) if top else {})

    stacked = _scan_blocks(body, (), blocks)[1]
    per_position = {name: _merge_blocks(x, h_ND.shape[0], settings.parts) for name, x in stacked.items()}
    per_position = {name: x.reshape(*h_BSD.shape[:2], *x.shape[1:]) for name, x in per_position.items()}
    weights_BS = jnp.asarray(batch.weights).astype(jnp.float32)
    metrics = {name: gather_on_first_device(x) for name, x in per_position.items()}
    return jnp.sum(weights_BS * per_position["nll"]), jnp.sum(weights_BS), metrics


def weighted_nll(
    h_ND: jax.Array,
    w_VD: jax.Array,
    targets_N: jax.Array,
    weights_N: jax.Array,
    block_size: int | None,
    softcap: float | None = None,
) -> jax.Array:
    """Returns sum_n weights[n] * -log softmax(cap(w h[n]))[targets[n]], a float32 scalar; softcap as in `HeadSpec`."""
    sums: TokenSums = _token_sums(h_ND, w_VD, targets_N, weights_N, _Settings(block_size, softcap))
    return sums.nll


class _Settings(NamedTuple):
    """Settings of the head, as in `token_loss` and `HeadSpec`."""

    block_size: int | None
    softcap: float | None
    terms: LossTerms = CROSS_ENTROPY
    parts: int = 1
    """Number of parts of the tokens on different devices; each part is split into blocks."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_sums(
    h_ND: jax.Array, w_VD: jax.Array, targets_N: jax.Array, weights_N: jax.Array, settings: _Settings
) -> TokenSums:
    """Sums the terms over the tokens. The gradient of `nll` is the gradient of `nll + z_loss`; other terms have none.

    Under differentiation, the gradients are computed block by block in the forward pass, while the logits exist, so
    logits are neither saved nor recomputed. Otherwise only the sums are computed. Products are in the dtype of `h_ND`
    and logits in float32; the gradient of `w_VD` is summed in float32 over the blocks.
    """
    # Cast once here, instead of in every block.
    blocks, cast_VD = _split_blocks(h_ND, targets_N, weights_N, settings), w_VD.astype(h_ND.dtype)

    def body(totals: TokenSums, block: _Block) -> tuple[TokenSums, None]:
        h_CD, targets_C, weights_C = block
        softmax = _softmax(h_CD, cast_VD, targets_C, settings.softcap)
        return _add_weighted(totals, softmax.token_terms(settings.terms), weights_C), None

    return _scan_blocks(body, _zero_sums(settings.terms), blocks, cast_VD)[0]


class _Softmax(NamedTuple):
    """Parts of the softmax of a block of tokens; float32."""

    shifted_CV: jax.Array
    """Logits minus the highest logit of the token."""
    e_CV: jax.Array
    """exp(shifted)."""
    sums_C1: jax.Array
    """Row sums of exp(shifted)."""
    log_z_C1: jax.Array
    """Logarithms of the row sums of exp(logits)."""
    target_logits_C1: jax.Array
    """Logits of the target tokens."""
    slopes_CV: jax.Array | None
    """Derivatives of the softcapped logits with respect to the logits."""

    def token_terms(self, terms: LossTerms) -> TokenSums:
        """Computes the terms of each token, float32 [C]."""
        z_loss_C = entropy_C = None
        nll_C = (self.log_z_C1 - self.target_logits_C1)[:, 0]
        if terms.z_loss_weight:
            z_loss_C = terms.z_loss_weight * jnp.square(self.log_z_C1[:, 0])
        if terms.entropy:
            expected_C1 = jnp.sum(self.e_CV * self.shifted_CV, axis=-1, keepdims=True) / self.sums_C1
            entropy_C = (jnp.log(self.sums_C1) - expected_C1)[:, 0]
        return TokenSums(nll_C, z_loss_C, entropy_C)

    def top_tokens(self, targets_C: jax.Array, count: int) -> dict[str, jax.Array]:
        """Computes `rank`, `top_ids` and `top_nll` of `token_nll`, [C] and [C, count]."""
        # Compares identical numbers, so rounding cannot rank a token before itself.
        target_C1 = jnp.take_along_axis(self.shifted_CV, targets_C[:, None], axis=-1, mode="fill")
        rank_C = jnp.sum(self.shifted_CV > target_C1, axis=-1)
        top_CK, ids_CK = jax.lax.top_k(self.shifted_CV, count)
        top_nll_CK = jnp.log(self.sums_C1) - top_CK
        return {"rank": rank_C.astype(jnp.float32), "top_ids": ids_CK.astype(jnp.float32), "top_nll": top_nll_CK}

    def gradient_scale(self, terms: LossTerms) -> jax.Array:
        """Returns [C, 1]: times e, the derivative of nll + z_loss by the logits, except for the target's 1."""
        reciprocal_C1 = 1.0 / self.sums_C1
        if not terms.z_loss_weight:
            return reciprocal_C1
        return reciprocal_C1 * (1.0 + 2.0 * terms.z_loss_weight * self.log_z_C1)


def _softmax(h_CD: jax.Array, w_VD: jax.Array, targets_C: jax.Array, softcap: float | None) -> _Softmax:
    logits_CV = jnp.matmul(h_CD, w_VD.astype(h_CD.dtype).T, preferred_element_type=jnp.float32)
    slopes_CV = None
    if softcap is not None:
        bounded_CV = jnp.tanh(logits_CV * (1.0 / softcap))
        logits_CV, slopes_CV = softcap * bounded_CV, 1.0 - jnp.square(bounded_CV)
    # The largest exponent is 0, so no exponential overflows and their sum is at least 1.
    highest_C1 = jnp.max(logits_CV, axis=-1, keepdims=True)
    shifted_CV = logits_CV - highest_C1
    e_CV = jnp.exp(shifted_CV)
    sums_C1 = jnp.sum(e_CV, axis=-1, keepdims=True)
    # A target past the vocabulary makes the loss NaN, which is noticed, instead of using the loss of another token.
    target_logits_C1 = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1, mode="fill")
    return _Softmax(shifted_CV, e_CV, sums_C1, highest_C1 + jnp.log(sums_C1), target_logits_C1, slopes_CV)


def _zero_sums(terms: LossTerms) -> TokenSums:
    # Separate arrays, because the compiler would treat one array used twice in the initial value of a loop as a single
    # value.
    requested = (True, bool(terms.z_loss_weight), terms.entropy)
    return TokenSums(*(jnp.zeros((), jnp.float32) if is_requested else None for is_requested in requested))  # pyright: ignore[reportArgumentType]


def _add_weighted(totals: TokenSums, tokens: TokenSums, weights_C: jax.Array) -> TokenSums:
    return jax.tree.map(lambda total, x_C: total + jnp.sum(weights_C * x_C), totals, tokens)


@jax.named_scope("loss")
def _forward(
    h_ND: jax.Array, w_VD: jax.Array, targets_N: jax.Array, weights_N: jax.Array, settings: _Settings
) -> tuple[TokenSums, tuple[jax.Array, jax.Array, jax.Array]]:
    blocks, terms = _split_blocks(h_ND, targets_N, weights_N, settings), settings.terms
    cast_VD = w_VD.astype(h_ND.dtype)

    def body(
        carry: tuple[TokenSums, jax.Array], block: _Block
    ) -> tuple[tuple[TokenSums, jax.Array], tuple[jax.Array, jax.Array]]:
        totals, dw = carry
        h_CD, targets_C, weights_C = block
        softmax = _softmax(h_CD, cast_VD, targets_C, settings.softcap)
        tokens = softmax.token_terms(terms)
        loss_C = tokens.nll if tokens.z_loss is None else tokens.nll + tokens.z_loss
        scale_C1 = softmax.gradient_scale(terms)
        # A comparison fuses into the subtraction; a scatter would be a separate operation.
        hot_CV = targets_C[:, None] == jnp.arange(w_VD.shape[0])[None, :]
        d_CV = weights_C[:, None] * (softmax.e_CV * scale_C1 - hot_CV)
        # Rounded to the compute dtype, so that both products of the backward pass are computed in it.
        d_CV = (d_CV if softmax.slopes_CV is None else d_CV * softmax.slopes_CV).astype(h_CD.dtype)
        dw = dw + _head_gradient(d_CV, h_CD, settings.parts)
        return (_add_weighted(totals, tokens, weights_C), dw), (d_CV @ cast_VD, loss_C)

    shape = w_VD.shape if settings.parts == 1 else (settings.parts, *w_VD.shape)
    zero = (_zero_sums(terms), jnp.zeros(shape, jnp.float32))
    (totals, dw), (dh, loss) = _scan_blocks(body, zero, blocks, cast_VD)
    dw_VD = dw if settings.parts == 1 else jnp.sum(dw, axis=0)
    dh_ND, loss_N = (_merge_blocks(x, h_ND.shape[0], settings.parts) for x in (dh, loss))
    return totals, (dh_ND, dw_VD.astype(w_VD.dtype), loss_N)


def _head_gradient(d_CV: jax.Array, h_CD: jax.Array, parts: int) -> jax.Array:
    """Returns float32 [V, D] or, with several parts, [parts, V, D], to be added across devices at the end."""
    if parts == 1:
        return jnp.matmul(d_CV.T, h_CD, preferred_element_type=jnp.float32)
    d_PCV, h_PCD = (x.reshape(parts, -1, x.shape[-1]) for x in (d_CV, h_CD))
    return jnp.einsum("pcv,pcd->pvd", d_PCV, h_PCD, preferred_element_type=jnp.float32)


@jax.named_scope("loss")
def _backward(
    settings: _Settings, residuals: tuple[jax.Array, jax.Array, jax.Array], cotangents: TokenSums
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    del settings
    # The gradients assume a cotangent of 1. The loss is linear in the weights, so the token losses are the gradient of
    # the weights.
    dh_ND, dw_VD, loss_N = (r.astype(jnp.float32) * cotangents.nll for r in residuals)
    return dh_ND.astype(residuals[0].dtype), dw_VD.astype(residuals[1].dtype), None, loss_N


_token_sums.defvjp(_forward, _backward)


def _split_blocks(
    h_ND: jax.Array, targets_N: jax.Array, weights_N: jax.Array, settings: _Settings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the tokens into blocks, [blocks, C, ...]; the last block is padded with tokens of weight 0.

    With several parts, a block has C / parts tokens from each part. A block within a single part would belong to a
    single device, and XLA would distribute its logits over all devices.
    """
    parts = settings.parts
    n = h_ND.shape[0] // parts
    size = min(settings.block_size or n, n)
    count = -(-n // size)

    def split(a: jax.Array) -> jax.Array:
        if parts == 1:
            # Zeros give a finite loss, which the weight of 0 removes exactly from every sum.
            return jnp.pad(a, [(0, count * size - n)] + [(0, 0)] * (a.ndim - 1)).reshape(count, size, *a.shape[1:])
        x = a.reshape(parts, n, *a.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, count * size - n)] + [(0, 0)] * (a.ndim - 1))
        x = jnp.moveaxis(x.reshape(parts, count, size, *a.shape[1:]), 1, 0)
        return x.reshape(count, parts * size, *a.shape[1:])

    return split(h_ND), split(targets_N), split(weights_N)


def _merge_blocks(x: jax.Array, n: int, parts: int) -> jax.Array:
    """Restores [N, ...] from [blocks, C, ...]; the inverse of `_split_blocks`."""
    if parts == 1:
        return x.reshape(-1, *x.shape[2:])[:n]
    x = jnp.moveaxis(x.reshape(x.shape[0], parts, -1, *x.shape[2:]), 1, 0)
    return x.reshape(parts, -1, *x.shape[3:])[:, : n // parts].reshape(n, *x.shape[3:])


def _scan_blocks(
    body: Callable[[Carry, _Block], tuple[Carry, Out]], zero: Carry, blocks: _Block, *closed_over: jax.Array
) -> tuple[Carry, Out]:
    """Calls `lax.scan`, but without a loop for a single block; `closed_over`: other arrays that `body` reads."""
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        carry, out = body(zero, jax.tree.map(lambda a: a[0], blocks))
        return carry, jax.tree.map(lambda a: a[None], out)
    # Inside a shard_map, the initial value of a loop must vary over the same devices as its result. A zero derived from
    # the inputs does so on every version of JAX, at no cost.
    inputs = [*jax.tree.leaves(blocks), *closed_over]
    zero_from_inputs = sum(jnp.where(False, a.reshape(-1)[0], 0).astype(jnp.float32) for a in inputs)
    return jax.lax.scan(body, jax.tree.map(lambda a: a + zero_from_inputs, zero), blocks)
