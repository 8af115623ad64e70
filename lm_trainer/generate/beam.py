"""Beam search: extends several candidate texts in parallel, and returns the one with the highest total probability.

Shape letters: B rows, N beams of a row, R = B * N, K candidates of a row, V vocabulary, G new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_NEVER = -1e9
"""Score of an absent entry. It is finite, so that beams with this score keep their order."""

Advance = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""`advance(carry, step, parents_R, next_R)` adds one token to each beam, and returns the new carry and the
log-probabilities [R, V] of the next token. Beam r continues beam `parents_R[r]` with the token `next_R[r]`."""


class _Beams(NamedTuple):
    """State of a search after a number of steps."""

    step: jax.Array
    running: jax.Array
    """bool: True while another step may change a result."""
    carry: Any
    log_probs_RV: jax.Array
    """Log-probabilities of the next token."""
    tokens_BNG: jax.Array
    """Unfinished texts."""
    scores_BN: jax.Array
    """Sums of log-probabilities, in descending order."""
    finished: _Finished
    open_B: jax.Array
    """bool: True while an unfinished text may become better than a finished text."""


class _Finished(NamedTuple):
    """The best finished texts."""

    tokens_BNG: jax.Array
    counts_BN: jax.Array
    """Number of tokens of each text."""
    scores_BN: jax.Array
    """Sums of log-probabilities divided by length ** penalty, in descending order."""
    valid_BN: jax.Array
    """bool: True if the entry holds a text."""


class _Candidates(NamedTuple):
    """The best continuations of a row: twice as many as beams, so that enough of them continue if every beam ends."""

    parents_BK: jax.Array
    """Index of the beam that each candidate continues."""
    next_BK: jax.Array
    tokens_BKG: jax.Array
    scores_BK: jax.Array
    ends_BK: jax.Array


def search_beams(  # noqa: PLR0913 - the choices of a search
    carry: Any,
    log_probs_RV: jax.Array,
    advance: Advance,
    *,
    beams: int,
    max_new_tokens: int,
    eos_id: jax.Array,
    length_penalty: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Finds the most likely text of each row, like `generate(num_beams=...)` of transformers with its defaults.

    A row is done when it has `beams` finished texts, and no unfinished text, scored at its current length, is better
    than the worst of them (`early_stopping=False`). Call this function under `jax.jit`.

    Args:
        carry: state of `advance` after the tokens so far, a pytree of arrays.
        log_probs_RV: log-probabilities of the first token, float32; identical for the beams of a row.
        advance: adds one token to each beam; see `Advance`.
        beams: number of beams per row.
        max_new_tokens: maximum length of a text.
        eos_id: the token that ends a text, int32 scalar.
        length_penalty: float32 scalar; a positive value favours long texts, and a negative value favours short texts.

    Returns:
        The tokens, int32 [B, max_new_tokens], and the number of valid tokens of each row, int32 [B].
    """
    rows = log_probs_RV.shape[0] // beams
    tokens_BNG = jnp.zeros((rows, beams, max_new_tokens), jnp.int32)
    never_BN, zeros_BN = jnp.full((rows, beams), _NEVER, jnp.float32), jnp.zeros((rows, beams), jnp.int32)
    finished = _Finished(tokens_BNG, zeros_BN, never_BN, zeros_BN > 0)
    # All beams start from the same text, so the first step extends only one of them.
    scores_BN = never_BN.at[:, 0].set(0.0)
    start = _Beams(
        jnp.int32(0), jnp.bool_(True), carry, log_probs_RV, tokens_BNG, scores_BN, finished, jnp.ones(rows, bool)
    )

    def body(state: _Beams) -> _Beams:
        candidates = _best_candidates(state, eos_id, max_new_tokens)
        unfinished_BN, selected_BN = jax.lax.top_k(candidates.scores_BK + _NEVER * candidates.ends_BK, beams)
        finished = _merge_finished(state.finished, candidates, state.step + 1, state.open_B, length_penalty)
        open_B = state.open_B & _may_improve(unfinished_BN, finished, state.step + 1, length_penalty)
        parents_BN, next_BN = (
            _gather_entries(candidates.parents_BK, selected_BN),
            _gather_entries(candidates.next_BK, selected_BN),
        )
        parents_R = (parents_BN + beams * jnp.arange(rows)[:, None]).reshape(-1)
        carry, log_probs_RV = advance(state.carry, state.step, parents_R, next_BN.reshape(-1))
        running = jnp.any(open_B) & ~jnp.all(candidates.ends_BK)
        tokens_BNG = _gather_entries(candidates.tokens_BKG, selected_BN)
        return _Beams(state.step + 1, running, carry, log_probs_RV, tokens_BNG, unfinished_BN, finished, open_B)

    best = jax.lax.while_loop(lambda state: state.running, body, start).finished
    return best.tokens_BNG[:, 0], best.counts_BN[:, 0]


def _best_candidates(state: _Beams, eos_id: jax.Array, max_new_tokens: int) -> _Candidates:
    rows, beams = state.scores_BN.shape
    vocab_size = state.log_probs_RV.shape[-1]
    sums_BNV = state.log_probs_RV.reshape(rows, beams, vocab_size) + state.scores_BN[:, :, None]
    scores_BK, indices_BK = jax.lax.top_k(sums_BNV.reshape(rows, -1), 2 * beams)
    parents_BK, next_BK = indices_BK // vocab_size, indices_BK % vocab_size
    tokens_BKG = _gather_entries(state.tokens_BNG, parents_BK).at[:, :, state.step].set(next_BK)
    return _Candidates(
        parents_BK, next_BK, tokens_BKG, scores_BK, (next_BK == eos_id) | (state.step + 1 == max_new_tokens)
    )


def _merge_finished(
    finished: _Finished, candidates: _Candidates, length: jax.Array, open_B: jax.Array, length_penalty: jax.Array
) -> _Finished:
    """Adds newly finished texts to the finished texts, and keeps the best ones. Rows that are done do not change."""
    beams, count = finished.scores_BN.shape[1], candidates.scores_BK.shape[1]
    # The remaining candidates only ensure that enough texts continue.
    new_BK = candidates.ends_BK & (jnp.arange(count) < beams)[None]
    scores_BK = candidates.scores_BK / length.astype(jnp.float32) ** length_penalty
    scores_BK = scores_BK + _NEVER * ~open_B[:, None] + _NEVER * ~new_BK
    lengths_BK = jnp.broadcast_to(length, new_BK.shape)
    newly_finished = _Finished(candidates.tokens_BKG, lengths_BK, scores_BK, new_BK)
    merged = _Finished(*(jnp.concatenate(pair, axis=1) for pair in zip(finished, newly_finished, strict=True)))
    _, best_BN = jax.lax.top_k(merged.scores_BN, beams)
    return _Finished(*(_gather_entries(x, best_BN) for x in merged))


def _may_improve(
    unfinished_BN: jax.Array, finished: _Finished, length: jax.Array, length_penalty: jax.Array
) -> jax.Array:
    """Returns True if the best unfinished text, if it ended now, would score above the worst finished text."""
    best_B1 = unfinished_BN[:, :1] / length.astype(jnp.float32) ** length_penalty
    worst_BN = jnp.where(finished.valid_BN, finished.scores_BN.min(axis=1, keepdims=True), _NEVER)
    return jnp.any(best_B1 > worst_BN, axis=1)


def _gather_entries(x: jax.Array, indices_BN: jax.Array) -> jax.Array:
    """Gathers entries from each row of `x` [B, K, ...] by index."""
    return jnp.take_along_axis(x, indices_BN.reshape(*indices_BN.shape, *(1,) * (x.ndim - 2)), axis=1)
