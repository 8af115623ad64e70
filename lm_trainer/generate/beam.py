"""Beam search: of several texts that grow side by side, the one whose tokens are likeliest together.

Shape letters: B rows, N beams of a row, R = B * N, K candidates of a row, V vocabulary, G new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_NEVER = -1e9
"""Score of what is not there; finite, so that such beams stay in order."""

Advance = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""(carry, step, came_R, next_R) -> carry and log-probabilities [R, V] after one more token of each beam: beam r goes on
from what was beam `came_R[r]`, with the token `next_R[r]`."""


class _Beams(NamedTuple):
    """A search after some steps."""

    step: jax.Array
    going: jax.Array
    """bool: a step more may change a result."""
    carry: Any
    log_probs_RV: jax.Array
    """Those of the next token."""
    tokens_BNG: jax.Array
    """Texts that grow."""
    scores_BN: jax.Array
    """Sums of log-probabilities, the best first."""
    ended: _Ended
    open_B: jax.Array
    """bool: a text that grows may become better than one that ended."""


class _Ended(NamedTuple):
    """The best texts that ended."""

    tokens_BNG: jax.Array
    counts_BN: jax.Array
    """Their tokens."""
    scores_BN: jax.Array
    """Sums of log-probabilities over the length to the power of the penalty, the best first."""
    there_BN: jax.Array
    """bool: it is one."""


class _Candidates(NamedTuple):
    """The best continuations of a row, twice as many as beams: each beam may end, and as many still go on."""

    came_BK: jax.Array
    """The beam that each continues."""
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
    room: int,
    eos_id: jax.Array,
    length_penalty: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Searches the likeliest text of each row, as `generate(num_beams=...)` of transformers does with its defaults.

    A row is done when it has `beams` texts that ended, and none that grows is, for its length so far, better than the
    worst of them (`early_stopping=False`). To be called under `jax.jit`.

    Args:
        carry: what `advance` needs of the tokens so far, a tree of arrays.
        log_probs_RV: of the first token, float32; those of the beams of a row are equal.
        advance: takes a step.
        beams: of each row.
        room: tokens after which a text ends in any case.
        eos_id: the token that ends it, int32 scalar.
        length_penalty: float32 scalar; above 0 favours long texts, below 0 short ones.

    Returns:
        tokens, int32 [B, room], and how many of them count, int32 [B].
    """
    rows = log_probs_RV.shape[0] // beams
    tokens_BNG = jnp.zeros((rows, beams, room), jnp.int32)
    never_BN, zeros_BN = jnp.full((rows, beams), _NEVER, jnp.float32), jnp.zeros((rows, beams), jnp.int32)
    ended = _Ended(tokens_BNG, zeros_BN, never_BN, zeros_BN > 0)
    # All beams begin as one text, of which one goes on.
    scores_BN = never_BN.at[:, 0].set(0.0)
    start = _Beams(
        jnp.int32(0), jnp.bool_(True), carry, log_probs_RV, tokens_BNG, scores_BN, ended, jnp.ones(rows, bool)
    )

    def body(state: _Beams) -> _Beams:
        found = _candidates(state, eos_id, room)
        growing_BN, kept_BN = jax.lax.top_k(found.scores_BK + _NEVER * found.ends_BK, beams)
        ended = _with_new(state.ended, found, state.step + 1, state.open_B, length_penalty)
        open_B = state.open_B & _may_improve(growing_BN, ended, state.step + 1, length_penalty)
        came_BN, next_BN = _taken(found.came_BK, kept_BN), _taken(found.next_BK, kept_BN)
        came_R = (came_BN + beams * jnp.arange(rows)[:, None]).reshape(-1)
        carry, log_probs_RV = advance(state.carry, state.step, came_R, next_BN.reshape(-1))
        going = jnp.any(open_B) & ~jnp.all(found.ends_BK)
        tokens_BNG = _taken(found.tokens_BKG, kept_BN)
        return _Beams(state.step + 1, going, carry, log_probs_RV, tokens_BNG, growing_BN, ended, open_B)

    best = jax.lax.while_loop(lambda state: state.going, body, start).ended
    return best.tokens_BNG[:, 0], best.counts_BN[:, 0]


def _candidates(state: _Beams, eos_id: jax.Array, room: int) -> _Candidates:
    rows, beams = state.scores_BN.shape
    vocab_size = state.log_probs_RV.shape[-1]
    sums_BNV = state.log_probs_RV.reshape(rows, beams, vocab_size) + state.scores_BN[:, :, None]
    scores_BK, at_BK = jax.lax.top_k(sums_BNV.reshape(rows, -1), 2 * beams)
    came_BK, next_BK = at_BK // vocab_size, at_BK % vocab_size
    tokens_BKG = _taken(state.tokens_BNG, came_BK).at[:, :, state.step].set(next_BK)
    return _Candidates(came_BK, next_BK, tokens_BKG, scores_BK, (next_BK == eos_id) | (state.step + 1 == room))


def _with_new(
    ended: _Ended, found: _Candidates, length: jax.Array, open_B: jax.Array, length_penalty: jax.Array
) -> _Ended:
    """The best of the texts that ended before and of those that end here; a row that is done takes no more."""
    beams, count = ended.scores_BN.shape[1], found.scores_BK.shape[1]
    # The others are there so that enough texts go on.
    new_BK = found.ends_BK & (jnp.arange(count) < beams)[None]
    scores_BK = found.scores_BK / length.astype(jnp.float32) ** length_penalty
    scores_BK = scores_BK + _NEVER * ~open_B[:, None] + _NEVER * ~new_BK
    lengths_BK = jnp.broadcast_to(length, new_BK.shape)
    new = _Ended(found.tokens_BKG, lengths_BK, scores_BK, new_BK)
    every = _Ended(*(jnp.concatenate(pair, axis=1) for pair in zip(ended, new, strict=True)))
    _, best_BN = jax.lax.top_k(every.scores_BN, beams)
    return _Ended(*(_taken(x, best_BN) for x in every))


def _may_improve(growing_BN: jax.Array, ended: _Ended, length: jax.Array, length_penalty: jax.Array) -> jax.Array:
    """Tells whether the best text that grows would be better, if it ended at its length, than the worst that ended."""
    best_B1 = growing_BN[:, :1] / length.astype(jnp.float32) ** length_penalty
    worst_BN = jnp.where(ended.there_BN, ended.scores_BN.min(axis=1, keepdims=True), _NEVER)
    return jnp.any(best_B1 > worst_BN, axis=1)


def _taken(x: jax.Array, at_BN: jax.Array) -> jax.Array:
    """The entries of each row of `x`, [B, K, ...], at some places."""
    return jnp.take_along_axis(x, at_BN.reshape(*at_BN.shape, *(1,) * (x.ndim - 2)), axis=1)
