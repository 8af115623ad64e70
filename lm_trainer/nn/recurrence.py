"""Linear recurrences with a matrix as their state, computed chunk by chunk, and short causal convolutions.

At each position the state of a head, a matrix S, decays and receives the product of a key and a value:

    S_t = a_t S_{t-1} + k_t v_t^T                                   (a state-space model; Dao and Gu 2024)
    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T           (gated delta rule; Yang et al. 2025)

and its result is o_t = S_t^T q_t. Inside a chunk the results are products of matrices, as in attention; only the states
at the ends of chunks are computed one after another. A document that starts inside a row starts with a state of zeros.

Shape letters: B rows, S positions, C chunks, L and M positions of a chunk, G heads of queries and keys, R heads of
values per head of keys, K size of queries and keys, P size of values, T taps of a convolution; `...` any dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.broadcast import with_rank_of
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.read import read


class RecurrenceInputs(NamedTuple):
    """Inputs of a recurrence, float32. A position with a log decay of 0, and a key or value of 0, does not change the
    state.
    """

    q_BSGK: jax.Array
    k_BSGK: jax.Array
    v_BSGRP: jax.Array
    log_decay_BSGR: jax.Array
    """log a_t, at most 0."""
    rate_BSGR: jax.Array | None = None
    """b_t of the delta rule; None: the recurrence without it."""


def document_numbers(segments_BS: jax.Array | None) -> jax.Array | None:
    """Returns int32 [B, S]: the number of the document of each position, counted from 1; 0 means the state before the
    row. None if the row continues that state, for which `segments_BS` is None.
    """
    if segments_BS is None:
        return None
    starts_BS = jnp.concatenate(
        [jnp.ones_like(segments_BS[:, :1], bool), segments_BS[:, 1:] != segments_BS[:, :-1]], axis=1
    )
    return jnp.cumsum(starts_BS.astype(jnp.int32), axis=1)


def run_recurrence(
    inputs: RecurrenceInputs, state_BGRKP: jax.Array, documents_BS: jax.Array | None, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """Computes the results, float32 [B, S, G, R, P], and the state after the last position.

    Args:
        inputs: queries, keys, values and decays.
        state_BGRKP: float32; state before the first position.
        documents_BS: result of `document_numbers`.
        chunk_size: number of positions of a chunk; it changes results only by rounding.
    """
    length = inputs.q_BSGK.shape[1]
    size = min(chunk_size, length)
    chunks = _Chunks.split(inputs, documents_BS, size)
    scores_BCGLM = jnp.einsum("bclgk,bcmgk->bcglm", chunks.q_BCLGK, chunks.k_BCLGK)
    weights_BCGRLM = scores_BCGLM[:, :, :, None] * chunks.pair_decays()
    entering_BCGRL, leaving_BCGRL, kept_BCGR = chunks.state_decays()
    # The value that a position adds to the state: its own value or, with the delta rule, the difference between this
    # value and the value that the state already has for the key.
    if chunks.rate_BCLGR is None:
        added_BCLGRP, read_BCLGRK = chunks.v_BCLGRP, None
    else:
        added_BCLGRP, read_BCLGRK = chunks.apply_delta_rule(entering_BCGRL)

    def run_chunk(state_BGRKP: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BLGK, k_BLGK, added_BLGRP, weights_BGRLM, entering_BGRL, leaving_BGRL, kept_BGR, *reading = chunk
        if reading:
            added_BLGRP = added_BLGRP - jnp.einsum("blgrk,bgrkp->blgrp", reading[0], state_BGRKP)
        carried_BGRLP = jnp.einsum("blgk,bgrkp->bgrlp", q_BLGK, state_BGRKP) * entering_BGRL[..., None]
        o_BGRLP = carried_BGRLP + jnp.einsum("bgrlm,bmgrp->bgrlp", weights_BGRLM, added_BLGRP)
        decayed_BLGRP = added_BLGRP * jnp.moveaxis(leaving_BGRL, 3, 1)[..., None]
        new_BGRKP = jnp.einsum("blgk,blgrp->bgrkp", k_BLGK, decayed_BLGRP)
        return state_BGRKP * kept_BGR[..., None, None] + new_BGRKP, o_BGRLP

    scanned = (chunks.q_BCLGK, chunks.k_BCLGK, added_BCLGRP, weights_BCGRLM, entering_BCGRL, leaving_BCGRL, kept_BCGR)
    scanned = scanned if read_BCLGRK is None else (*scanned, read_BCLGRK)
    state_BGRKP, o_CBGRLP = jax.lax.scan(run_chunk, state_BGRKP, tuple(jnp.moveaxis(x, 1, 0) for x in scanned))
    o_BCLGRP = jnp.transpose(o_CBGRLP, (1, 0, 4, 2, 3, 5))
    return o_BCLGRP.reshape(o_BCLGRP.shape[0], -1, *o_BCLGRP.shape[3:])[:, :length], state_BGRKP


class _Chunks(NamedTuple):
    """Inputs of a recurrence in chunks."""

    q_BCLGK: jax.Array
    k_BCLGK: jax.Array
    v_BCLGRP: jax.Array
    rate_BCLGR: jax.Array | None
    sum_BCGRL: jax.Array
    """Sums of the log decays up to each position, inclusive, from the start of its chunk or document."""
    documents_BCL: jax.Array | None

    @classmethod
    def split(cls, inputs: RecurrenceInputs, documents_BS: jax.Array | None, size: int) -> _Chunks:
        """Splits rows into chunks of `size` positions. Positions that fill the last one leave the state as it is."""

        def chunk(x: jax.Array, mode: str = "constant") -> jax.Array:
            padding = [(0, -x.shape[1] % size if axis == 1 else 0) for axis in range(x.ndim)]
            return jnp.pad(x, padding, mode=mode).reshape(x.shape[0], -1, size, *x.shape[2:])

        rate_BSGR = inputs.rate_BSGR
        documents_BCL = None if documents_BS is None else chunk(documents_BS, mode="edge")
        # A product with a mask, and not differences of sums over the chunk: no bit of a sum may depend on the document
        # before.
        visible_BCLM = _visible_pairs(documents_BCL, size).astype(jnp.float32)
        log_decay_BCLGR = chunk(inputs.log_decay_BSGR)
        visible_BCLM = jnp.broadcast_to(visible_BCLM, (*log_decay_BCLGR.shape[:3], size))
        return cls(
            chunk(inputs.q_BSGK),
            chunk(inputs.k_BSGK),
            chunk(inputs.v_BSGRP),
            None if rate_BSGR is None else chunk(rate_BSGR),
            jnp.einsum("bclm,bcmgr->bcgrl", visible_BCLM, log_decay_BCLGR, precision="highest"),
            documents_BCL,
        )

    def pair_decays(self) -> jax.Array:
        """Returns [B, C, G, R, L, M]: the decay between position M and a later position L of its document, and 0 for
        other pairs.
        """
        visible = _visible_pairs(self.documents_BCL, self.sum_BCGRL.shape[-1])[:, :, None, None]
        # Masked before the exponential, so that neither it nor its gradient overflows.
        log_BCGRLM = self.sum_BCGRL[..., :, None] - self.sum_BCGRL[..., None, :]
        return jnp.where(visible, jnp.exp(jnp.where(visible, log_BCGRLM, 0.0)), 0.0)

    def state_decays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the decays from the state before a chunk to its positions, and from its positions to the state after
        it, [B, C, G, R, L] each, and from state to state, [B, C, G, R]. They are 0 where a document starts in between.
        """
        last_BCGR1 = self.sum_BCGRL[..., -1:]
        entering_BCGRL, left_BCGRL = self.sum_BCGRL, last_BCGR1 - self.sum_BCGRL
        if self.documents_BCL is None:
            return jnp.exp(entering_BCGRL), jnp.exp(left_BCGRL), jnp.exp(last_BCGR1[..., 0])
        last_BC1 = self.documents_BCL[:, :, -1:]
        before_BC1 = jnp.concatenate([jnp.zeros_like(last_BC1[:, :1]), last_BC1[:, :-1]], axis=1)
        enters, leaves = (
            (self.documents_BCL == document_BC1)[:, :, None, None] for document_BC1 in (before_BC1, last_BC1)
        )
        # Masked before the exponential as well: between documents, the difference of the sums has no bound.
        return (
            jnp.where(enters, jnp.exp(entering_BCGRL), 0.0),
            jnp.where(leaves, jnp.exp(jnp.where(leaves, left_BCGRL, 0.0)), 0.0),
            jnp.where(before_BC1 == last_BC1, 1.0, 0.0)[..., None] * jnp.exp(last_BCGR1[..., 0]),
        )

    def apply_delta_rule(self, entering_BCGRL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the values that positions add to a state of zeros, [B, C, L, G, R, P], and the keys with which they
        read the state before the chunk, whose values are subtracted, [B, C, L, G, R, K].

        A position subtracts what earlier positions of the chunk added, so the values solve a triangular system (Yang et
        al. 2024, arXiv 2406.06484, section 3.2).
        """
        assert self.rate_BCLGR is not None
        keys_BCGLM = jnp.einsum("bclgk,bcmgk->bcglm", self.k_BCLGK, self.k_BCLGK)
        rate_BCGRL = jnp.moveaxis(self.rate_BCLGR, 2, 4)
        system_BCGRLM = rate_BCGRL[..., None] * keys_BCGLM[:, :, :, None] * self.pair_decays()
        inverse_BCGRLM = invert_unit_lower(system_BCGRLM)
        added_BCLGRP = self.v_BCLGRP * self.rate_BCLGR[..., None]
        read_BCLGRK = self.k_BCLGK[:, :, :, :, None] * jnp.moveaxis(rate_BCGRL * entering_BCGRL, 4, 2)[..., None]
        return (
            jnp.einsum("bcgrlm,bcmgrp->bclgrp", inverse_BCGRLM, added_BCLGRP),
            jnp.einsum("bcgrlm,bcmgrk->bclgrk", inverse_BCGRLM, read_BCLGRK),
        )


def _visible_pairs(documents_BCL: jax.Array | None, size: int) -> jax.Array:
    """Returns bool [B, C, L, M] or [1, 1, L, M]: true if M is at or before L, and in the same document."""
    visible = jnp.tril(jnp.ones((size, size), bool))[None, None]
    if documents_BCL is None:
        return visible
    return visible & (documents_BCL[:, :, :, None] == documents_BCL[:, :, None, :])


def invert_unit_lower(x: jax.Array) -> jax.Array:
    """Inverts triangular matrices [..., L, L]: I plus the part of `x` below its diagonal.

    The inverse of a matrix of blocks [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']], with A' and B' the inverses of A
    and B. Blocks of 1, 2, 4, ... rows are inverted in turn, all blocks of a size at once.
    """
    length = x.shape[-1]
    width = 1 << (length - 1).bit_length()
    padding = [(0, 0)] * (x.ndim - 2) + [(0, width - length)] * 2
    padded = jnp.pad(x, padding)
    leading = x.shape[:-2]
    inverse = jnp.ones((*leading, width, 1, 1), x.dtype)
    size = 1
    while size < width:
        count = width // (2 * size)
        blocks = padded.reshape(*leading, count, 2 * size, count, 2 * size)
        # The blocks of 2 * size rows on the diagonal, and of each the part below and left.
        diagonal = jnp.stack([blocks[..., i, size:, i, :size] for i in range(count)], axis=-3)
        pairs = inverse.reshape(*leading, count, 2, size, size)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        below = -jnp.matmul(second, jnp.matmul(diagonal, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :length, :length]


class ShortConv(nnx.Module):
    """A causal convolution over a few positions with separate weights for each channel, followed by SiLU."""

    def __init__(self, channels: Mapping[str, int], *, width: int, bias: bool, init: Initializer):
        self.width = width
        # A dimension of size 1 for the channels that a channel reads, as in files.
        self.weight = init.uniform({"taps": width, "inputs": 1, **channels}, width**-0.5)
        self.bias = init.constant(channels, 0.0) if bias else None

    def __call__(
        self,
        x: jax.Array,
        documents_BS: jax.Array | None,
        history: jax.Array | None,
        counts_B: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the result in the shape and dtype of `x`, and the new history.

        Args:
            x: inputs, [B, S, ...].
            documents_BS: result of `document_numbers`; a position reads inputs of its own document only.
            history: inputs at the last `width - 1` positions before `x`, [B, T - 1, ...]; None: zeros.
            counts_B: number of positions of each row that count; None: all.
        """
        length, before = x.shape[1], self.width - 1
        weight = read(self.weight, x.dtype)
        past = jnp.zeros((x.shape[0], before, *x.shape[2:]), x.dtype) if history is None else history.astype(x.dtype)
        extended = jnp.concatenate([past, x], axis=1)
        y = jnp.zeros_like(x)
        for tap in range(self.width):
            inputs, distance = extended[:, tap : tap + length], before - tap
            if documents_BS is not None and distance:
                # Positions before the row are zeros in any case.
                earlier_BS = jnp.pad(documents_BS, ((0, 0), (distance, 0)))[:, :length]
                inputs = jnp.where(with_rank_of_rows(earlier_BS == documents_BS, inputs), inputs, 0)
            y = y + inputs * with_rank_of(weight[tap, 0], x)
        if self.bias is not None:
            y = y + with_rank_of(read(self.bias, x.dtype), y)
        return jax.nn.silu(y), self._new_history(extended, counts_B, length)

    def _new_history(self, extended: jax.Array, counts_B: jax.Array | None, length: int) -> jax.Array:
        if counts_B is None:
            return extended[:, length:]
        take = lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, self.width - 1)  # noqa: E731
        return jax.vmap(take)(extended, counts_B)


def with_rank_of_rows(x_BS: jax.Array, like: jax.Array) -> jax.Array:
    """Appends dimensions of size 1, so that [B, S] broadcasts to an array [B, S, ...]."""
    return x_BS.reshape(*x_BS.shape, *(1,) * (like.ndim - 2))
