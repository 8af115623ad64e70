"""Settings of generation, and sampling of the next token from the logits.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Settings of `generate`: end conditions and sampling."""

    max_new_tokens: int
    """Maximum number of tokens of a continuation."""
    temperature: float = 1.0
    """Softmax temperature; 0 selects the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all tokens."""
    top_p: float = 1.0
    """Samples from the most likely tokens whose probabilities reach this sum. `filter_logits` gives the order."""
    repetition_penalty: float = 1.0
    """Makes tokens that occur in the prompt or the continuation less likely, see `penalize_seen`; 1: disabled."""
    eos_id: int | tuple[int, ...] | None = None
    """One or several tokens that end a continuation; None: there is no such token."""
    seed: int = 0
    """Seed for sampling."""
    log_probs: bool = False
    """Also computes the log probability of each new token."""
    dtype: DTypeLike = jnp.float32
    """Dtype of the computation and of the cache."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """`eos_id` as a tuple, which may be empty."""
        return () if self.eos_id is None else (self.eos_id,) if isinstance(self.eos_id, int) else self.eos_id


def filter_logits(
    logits_BV: jax.Array, *, temperature: jax.Array | float, top_k: int, top_p: jax.Array | float | None
) -> jax.Array:
    """Computes the logits of the sampling distribution, float32 [B, V]. Excluded tokens have -inf.

    The steps, in order: divide by `temperature`; keep the `top_k` most likely tokens (0: all); renormalise the
    remaining distribution, and keep its most likely tokens up to and including the token at which the cumulative
    probability reaches `top_p` (Holtzman et al. 2020; None: all, without sorting them). Tokens as likely as the last
    token kept are also kept.
    """
    # float32 for any compute dtype, because a sum of many small bfloat16 probabilities might never reach `top_p`.
    logits_BV = logits_BV.astype(jnp.float32) / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        # Selected by value and not by index, so that no token with an equal logit is preferred because of its id.
        smallest_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    if top_p is None:
        return logits_BV
    included_BV = _sortable_bits(logits_BV) >= _nucleus_threshold(logits_BV, top_p)
    # A separate case, so that the result does not depend on rounding in the sum.
    return jnp.where(included_BV | (top_p >= 1.0), logits_BV, -jnp.inf)


def _nucleus_threshold(logits_BV: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """Returns the smallest number, as `_sortable_bits`, above which probabilities sum to less than `top_p`; [B, 1].

    Uses bisection, which takes 32 sums. On a CPU, sorting a vocabulary would take longer than running a small model.
    """
    ordered_BV, probs_BV = _sortable_bits(logits_BV), jax.nn.softmax(logits_BV, axis=-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        excluded_B1, included_B1 = bounds
        middle_B1 = (excluded_B1 & included_B1) + ((excluded_B1 ^ included_B1) >> 1)  # the mean, without overflow
        above_B1 = jnp.sum(jnp.where(ordered_BV > middle_B1, probs_BV, 0.0), axis=-1, keepdims=True)
        keeps_B1 = above_B1 < top_p
        return jnp.where(keeps_B1, excluded_B1, middle_B1), jnp.where(keeps_B1, middle_B1, included_B1)

    top_logit_B1 = jnp.max(ordered_BV, axis=-1, keepdims=True)
    return jax.lax.fori_loop(0, 32, halve, (jnp.full_like(top_logit_B1, -(2**31)), top_logit_B1))[1]


def _sortable_bits(values: jax.Array) -> jax.Array:
    """Maps float32 to int32 with the same order: the bits of the number, inverted if it is negative."""
    # 0.0 and -0.0 must map to the same integer.
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def penalize_seen(logits_BV: jax.Array, seen_BV: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divides positive logits of the tokens seen so far by `penalty`, and multiplies negative ones by it.

    Keskar et al. 2019 (arXiv 1909.05858), as implemented in transformers.
    """
    penalized_BV = jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return jnp.where(seen_BV, penalized_BV, logits_BV)


def sample_tokens(keys_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Samples one token per row, int32 [B]. Each row has its own key."""
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
