"""Exchange of tokens among devices that share the experts of a layer.

Each device sends a token once to each device that has any of its experts, and receives the sum of their results from
it. Rows are sorted by sender and then by position, so the order of all additions depends only on the microbatch and on
the number of devices along the axis `expert`.

Shape letters: M tokens of this device, K experts per token, G devices along the axis `expert`, T targets of a token
(the smaller of K and G), R rows of received tokens (M x G, as many as the devices have), D width of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.nn.expert_slots import Slots, assign_slots, slots_to_assignments, tokens_to_slots
from lm_trainer.parallel.collectives import all_gather, axis_index, axis_size
from lm_trainer.parallel.row_exchange import RowExchange, exchange_rows, plan_exchange
from lm_trainer.parallel.tree_sum import tree_sum

_AXIS = "expert"
_NO_EXPERT = -1


class ReceivedTokens(NamedTuple):
    """The tokens that a device receives for its experts, and the way back."""

    x_RD: jax.Array
    """Tokens; zeros in rows not in use."""
    experts_RK: jax.Array
    """int32 experts of the tokens, also experts of other devices; -1 in rows not in use."""
    weights_RK: jax.Array
    """Weights of these experts."""
    slots: Slots
    """Rows that this device sends, sorted by target."""
    exchange: RowExchange


def send_tokens(x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, num_local: int) -> ReceivedTokens:
    """Sends the tokens of all devices to the devices of their experts.

    Args:
        x_MD: tokens of this device.
        experts_MK: int32 experts of each token.
        weights_MK: weights of these experts.
        num_local: number of experts of each device.
    """
    devices, tokens = axis_size(_AXIS), x_MD.shape[0]
    # Experts and weights of all tokens are few bytes, from which every device computes who sends how many rows to whom.
    experts_RK, weights_RK = (all_gather(x, _AXIS, 0) for x in (experts_MK, weights_MK))
    chosen_RG = _choose_targets(experts_RK, num_local)
    counts_GG = jnp.sum(chosen_RG.reshape(devices, tokens, devices), axis=1, dtype=jnp.int32)
    exchange = plan_exchange(counts_GG, _AXIS)
    # The targets of a token in ascending order; `devices`, which gets no slot, after the last one.
    target_MG = jnp.where(_choose_targets(experts_MK, num_local), jnp.arange(devices), devices)
    target_MT = jnp.sort(target_MG, axis=1)[:, : experts_MK.shape[1]]
    slots = assign_slots(target_MT.reshape(-1), devices)
    x_RD = exchange_rows(tokens_to_slots(x_MD, slots), exchange, tokens * devices, _AXIS)
    # Rows arrive in the order of the gathered tokens, without tokens that have no expert on this device.
    arrivals = assign_slots(jnp.where(chosen_RG[:, axis_index(_AXIS)], 0, 1), 1)
    experts_RK = jnp.take(experts_RK, arrivals.assignment_P, axis=0, mode="fill", fill_value=_NO_EXPERT)
    return ReceivedTokens(x_RD, experts_RK, tokens_to_slots(weights_RK, arrivals), slots, exchange)


def _choose_targets(experts_MK: jax.Array, num_local: int) -> jax.Array:
    """Returns, for each token, the devices that have any of its experts; booleans, [M, G]."""
    owner_MK = experts_MK // num_local
    return jnp.any(owner_MK[:, :, None] == jnp.arange(axis_size(_AXIS))[None, None, :], axis=1)


def return_results(y_RD: jax.Array, slots: Slots, exchange: RowExchange) -> jax.Array:
    """Sends the results for received tokens back, and adds the results for each token of this device, [M, D]."""
    tokens = y_RD.shape[0] // axis_size(_AXIS)
    y_PD = exchange_rows(y_RD, exchange.reversed(), slots.assignment_P.shape[0], _AXIS)
    terms_MTD = slots_to_assignments(y_PD, slots).reshape(tokens, -1, y_RD.shape[1])
    # bfloat16 sums would lose a bit of precision with each addition.
    return tree_sum(jnp.moveaxis(terms_MTD.astype(jnp.float32), 1, 0)).astype(y_RD.dtype)
