"""Settings of generation, and the choice of the next token from its logits.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Settings of `generate`: the end of a continuation, and the choice of its tokens."""

    max_new_tokens: int
    """The longest continuation."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities reach this; order as in `filter_logits`."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the continuation less likely, as `penalize` does; 1: does nothing."""
    eos_id: int | tuple[int, ...] | None = None
    """Ends a continuation: a token, or each of several; None: nothing does."""
    seed: int = 0
    """The seed of the draws."""
    log_probs: bool = False
    """Compute the log probability of each new token as well."""
    dtype: DTypeLike = jnp.float32
    """The dtype of the computation and of the cache."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """`eos_id` as a list, which may be empty."""
        return () if self.eos_id is None else (self.eos_id,) if isinstance(self.eos_id, int) else self.eos_id


def filter_logits(
    logits_BV: jax.Array, *, temperature: jax.Array | float, top_k: int, top_p: jax.Array | float | None
) -> jax.Array:
    """Computes the logits of the distribution to draw from, float32 [B, V], -inf for tokens that are cut off.

    In this order: divide by `temperature`; keep the `top_k` likeliest tokens (0: all); of the distribution that
    remains, renormalised, keep the likeliest tokens up to and including the one that brings their sum to `top_p`
    (Holtzman et al. 2020; None: all, without sorting them). Tokens that tie with the last one kept are kept too.
    """
    # float32 whatever the model computes in: sums of many small bfloat16 probabilities would never reach `top_p`.
    logits_BV = logits_BV.astype(jnp.float32) / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        # By value and not by index: of tokens with equal logits none is preferred for its id.
        smallest_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    if top_p is None:
        return logits_BV
    kept_BV = _ordered(logits_BV) >= _least_kept(logits_BV, top_p)
    # Whatever the rounding of the sum.
    return jnp.where(kept_BV | (top_p >= 1.0), logits_BV, -jnp.inf)


def _least_kept(logits_BV: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """The least number, as `_ordered` has it, above which the probabilities are less than `top_p` together; [B, 1].

    Found by bisection: 32 sums, where sorting a vocabulary takes a CPU longer than a small model.
    """
    ordered_BV, probs_BV = _ordered(logits_BV), jax.nn.softmax(logits_BV, axis=-1)

    def halve(_: int, between: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cut_B1, kept_B1 = between
        middle_B1 = (cut_B1 & kept_B1) + ((cut_B1 ^ kept_B1) >> 1)  # the mean, which does not overflow
        above_B1 = jnp.sum(jnp.where(ordered_BV > middle_B1, probs_BV, 0.0), axis=-1, keepdims=True)
        keeps_B1 = above_B1 < top_p
        return jnp.where(keeps_B1, cut_B1, middle_B1), jnp.where(keeps_B1, middle_B1, kept_B1)

    likeliest_B1 = jnp.max(ordered_BV, axis=-1, keepdims=True)
    return jax.lax.fori_loop(0, 32, halve, (jnp.full_like(likeliest_B1, -(2**31)), likeliest_B1))[1]


def _ordered(values: jax.Array) -> jax.Array:
    """float32 as int32 of the same order: that of its bits, turned round where it is negative."""
    # There are two zeros, which are equal.
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def penalize(logits_BV: jax.Array, seen_BV: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divides the logits of tokens that were seen by `penalty`, or multiplies them where they are negative.

    Keskar et al. 2019 (arXiv 1909.05858), as transformers has it.
    """
    penalized_BV = jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return jnp.where(seen_BV, penalized_BV, logits_BV)


def draw(keys_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Draws one token per row, int32 [B], each row with its own key."""
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
