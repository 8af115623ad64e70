"""Rows in which every answer follows the prompt of another example, for estimates of the divergence of two models.

Shape letters: B rows, S positions; E examples of a row, of which there are at most S.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.objectives.pairs import pair_of_position


def with_mismatched_answers(batch: Batch) -> Batch:
    """Gives each prompt of a row the answer of the next example in the row, and the last prompt the first answer.

    The result has the same number of tokens in every row. An example that is alone in its row keeps its answer. The
    answer of an example consists of its first counted target and all targets after it.
    """
    tokens, targets, weights, positions, segments = (jnp.asarray(x) for x in batch[:5])
    moved = jax.vmap(_mismatch_row)(tokens, targets, weights, pair_of_position(batch))
    padding_BS = segments < 0
    original = (tokens, targets, weights, positions, segments)
    tokens, targets, weights, positions, segments = (
        jnp.where(padding_BS, old, new) for old, new in zip(original, moved, strict=True)
    )
    return Batch(tokens, targets, weights, positions, segments)


def _mismatch_row(
    tokens_S: jax.Array, targets_S: jax.Array, weights_S: jax.Array, examples_S: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the fields of the new row, which are arbitrary at positions of padding, all at the end of the row.

    Args:
        tokens_S: inputs.
        targets_S: targets.
        weights_S: weights of the targets.
        examples_S: index of the example of each position within the row, from 0; -1 for padding.
    """
    size = tokens_S.shape[0]
    index_S, inside_S, count = jnp.arange(size), examples_S >= 0, jnp.max(examples_S) + 1
    begins_S = _latest(examples_S != jnp.roll(examples_S, 1), index_S)
    counted_S = jnp.cumsum(weights_S > 0)
    in_answer_S = counted_S > (counted_S - (weights_S > 0))[begins_S]
    prompts_E, answers_E = (_count(examples_S, inside_S & part_S) for part_S in (~in_answer_S, in_answer_S))
    # The sizes of the new examples: each has its own prompt and the answer of the next one.
    following_E = jnp.where(index_S + 1 < count, index_S + 1, 0)
    ends_E = jnp.cumsum(jnp.where(index_S < count, prompts_E + answers_E[following_E], 0))
    starts_E = jnp.pad(ends_E[:-1], (1, 0))
    # Targets are permuted: prompts go to the beginnings of their new places, answers behind the prompt before.
    hosts_S = jnp.where(in_answer_S, (examples_S - 1) % jnp.maximum(count, 1), examples_S)
    within_S = index_S - begins_S
    to_S = starts_E[hosts_S] + within_S + jnp.where(in_answer_S, prompts_E[hosts_S] - prompts_E[examples_S], 0)
    from_S = jnp.argsort(jnp.where(inside_S, to_S, index_S))
    new_targets_S, new_examples_S = targets_S[from_S], jnp.searchsorted(ends_E, index_S, side="right")
    new_begins_S = starts_E[jnp.minimum(new_examples_S, size - 1)]
    # An input is the target before it, except for the first token of a prompt.
    firsts_S = tokens_S[jnp.searchsorted(examples_S + size * ~inside_S, new_examples_S)]
    new_tokens_S = jnp.where(index_S == new_begins_S, firsts_S, jnp.roll(new_targets_S, 1))
    return (
        new_tokens_S,
        new_targets_S,
        weights_S[from_S],
        (index_S - new_begins_S).astype(jnp.int32),
        (2 * new_examples_S).astype(jnp.int32),
    )


def _latest(starts_S: jax.Array, index_S: jax.Array) -> jax.Array:
    """Returns the index of the last True value up to each position; the first position counts as True."""
    return jax.lax.cummax(jnp.where(starts_S, index_S, 0))


def _count(examples_S: jax.Array, selected_S: jax.Array) -> jax.Array:
    """Returns the number of selected positions of each example, int32 [E]."""
    size = examples_S.shape[0]
    # Integers are exact, so the order of the additions does not matter.
    counts = jax.ops.segment_sum(selected_S.astype(jnp.int32), jnp.where(selected_S, examples_S, size), size + 1)
    return counts[:size]
