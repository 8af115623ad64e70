"""Sums of log probabilities over the pairs of answers in packed rows.

A row holds whole pairs. The chosen answer with its prompt is segment 2 p of the row, and the rejected answer with its
prompt is segment 2 p + 1, right after it. An example with a single answer has only one of the two segments.

Shape letters: B rows, S positions, N values per position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.objectives.base import PairSums

_SAFE_LOGP, _SAFE_TOKENS = -1.0, 1.0
"""Sums of positions that end no pair. Every loss and its gradient is finite for them, so they can be masked."""


def pair_of_position(batch: Batch) -> jax.Array:
    """Returns the number of the pair of each position within its row, int32 [B, S]; -1 for padding."""
    return jnp.asarray(batch.segments) // 2


def ends_of_pairs(batch: Batch) -> jax.Array:
    """Returns bool [B, S], True for the last position of each pair."""
    pairs_BS = pair_of_position(batch)
    next_BS = jnp.pad(pairs_BS[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return (pairs_BS != next_BS) & (pairs_BS >= 0)


def sum_over_pairs(logps_BS: jax.Array, reference_BS: jax.Array | None, batch: Batch) -> PairSums:
    """Sums log probabilities over the answers of each pair. Differentiable with respect to `logps_BS`.

    Args:
        logps_BS: log probabilities of the targets under the policy, float32.
        reference_BS: log probabilities of the targets under the reference; None for a loss without one.
        batch: rows of pairs. Only targets with a weight count.

    Returns:
        Arrays [B, S] with the sums of a pair at its last position. At other positions, they have arbitrary values at
        which losses are finite.
    """
    is_rejected_BS = (jnp.asarray(batch.segments) % 2).astype(jnp.float32)
    weights_BS = jnp.asarray(batch.weights).astype(jnp.float32)
    rejected_BS = weights_BS * is_rejected_BS
    chosen_BS = weights_BS - rejected_BS
    values = [chosen_BS * logps_BS, rejected_BS * logps_BS, chosen_BS, rejected_BS]
    if reference_BS is not None:
        values += [chosen_BS * reference_BS, rejected_BS * reference_BS]
    sums_BSN = _running_sums(jnp.stack(values, axis=-1), pair_of_position(batch))
    ends_BS = ends_of_pairs(batch)
    safe = [_SAFE_LOGP, _SAFE_LOGP, _SAFE_TOKENS, _SAFE_TOKENS, _SAFE_LOGP, _SAFE_LOGP]
    return PairSums(*(jnp.where(ends_BS, sums_BSN[..., n], safe[n]) for n in range(len(values))))


def _running_sums(values_BSN: jax.Array, pairs_BS: jax.Array) -> jax.Array:
    """Returns the sums over all positions of the same pair so far.

    A scan adds in a fixed order, and never subtracts sums of other pairs, whose rounding errors are as large as the sum
    of the row. Scattered additions would have no fixed order on GPUs.
    """
    starts_BS1 = jnp.pad(pairs_BS[:, 1:] != pairs_BS[:, :-1], ((0, 0), (1, 0)), constant_values=True)[..., None]

    def combine(
        earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (earlier_starts, earlier_sums), (later_starts, later_sums) = earlier, later
        sums = jnp.where(later_starts, later_sums, earlier_sums + later_sums)
        return earlier_starts | later_starts, sums

    return jax.lax.associative_scan(combine, (starts_BS1, values_BSN), axis=1)[1]
