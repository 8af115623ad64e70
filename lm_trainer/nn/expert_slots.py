"""Order of the rows of a grouped product: each assignment of a token to an expert gets a slot, sorted by expert.

Shape letters: M tokens, K experts per token, A assignments (M x K), P slots, D width of a row, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """A bijection between assignments and the used slots. Everything in it follows from the experts of the tokens."""

    assignment_P: jax.Array
    """int32 assignment of each slot; A for an empty slot."""
    slot_A: jax.Array
    """int32 slot of each assignment; P for an assignment to an expert of another device."""
    expert_P: jax.Array
    """int32 expert of each slot; any expert for an empty slot."""
    counts_E: jax.Array
    """int32 number of slots of each expert, without empty slots."""


def assign_slots(
    experts_A: jax.Array, num_experts: int, *, limit: int | None = None, align: int = 1, multiple: int = 1
) -> Slots:
    """Assigns slots in the order of the experts, and of the tokens for each expert.

    Args:
        experts_A: expert of each assignment; numbers below 0, or of `num_experts` and above, get no slot.
        num_experts: number of experts.
        limit: maximum number of assignments that get a slot. None: all of them.
        align: the slots of each expert start at a multiple of this number.
        multiple: the number of slots is a multiple of this number.
    """
    count = experts_A.shape[0]
    # Assignments to experts of other devices are sorted to the end.
    key_A = jnp.where((experts_A >= 0) & (experts_A < num_experts), experts_A, num_experts)
    order_A = jnp.argsort(key_A, stable=True).astype(jnp.int32)
    rank_A = jnp.argsort(order_A, stable=True).astype(jnp.int32)
    counts_E = jnp.bincount(key_A, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    ends_E = jnp.cumsum(counts_E)
    starts_E = ends_E - counts_E
    aligned_E = -(-counts_E // align) * align
    aligned_ends_E = jnp.cumsum(aligned_E)
    aligned_starts_E = aligned_ends_E - aligned_E
    # Every expert may add up to `align` - 1 empty slots.
    used = count if limit is None else limit
    slots = -(-(used + num_experts * (align - 1)) // multiple) * multiple
    positions_P = jnp.arange(slots, dtype=jnp.int32)
    expert_P = jnp.minimum(jnp.searchsorted(aligned_ends_E, positions_P, side="right"), num_experts - 1)
    offset_P = positions_P - aligned_starts_E[expert_P]
    used_P = (offset_P >= 0) & (offset_P < counts_E[expert_P])
    assignment_P = jnp.where(used_P, order_A[jnp.where(used_P, starts_E[expert_P] + offset_P, 0)], count)
    expert_A = jnp.minimum(key_A, num_experts - 1)
    slot_A = jnp.where(key_A < num_experts, aligned_starts_E[expert_A] + rank_A - starts_E[expert_A], slots)
    return Slots(*(x.astype(jnp.int32) for x in (assignment_P, slot_A, expert_P, counts_E)))


def _take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of `x`; zeros for an index past its end."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


# A gather has a scatter as its gradient, which adds in an order of the moment on GPUs. The gradients of both functions
# are gathers too, because slots and assignments are a bijection.


@jax.custom_vjp
def tokens_to_slots(x_MD: jax.Array, slots: Slots) -> jax.Array:
    """Copies each token to the slots of its assignments, [P, D]; empty slots are zero."""
    return _take_rows(x_MD, slots.assignment_P // (slots.slot_A.shape[0] // x_MD.shape[0]))


def _tokens_forward(x_MD: jax.Array, slots: Slots) -> tuple[jax.Array, tuple[Slots, jax.Array]]:
    # An array of no elements keeps the number of tokens.
    return tokens_to_slots(x_MD, slots), (slots, jnp.zeros((x_MD.shape[0], 0), x_MD.dtype))


def _tokens_backward(residuals: tuple[Slots, jax.Array], cotangent_PD: jax.Array) -> tuple[jax.Array, None]:
    slots, tokens = residuals
    terms_AD = _take_rows(cotangent_PD, slots.slot_A).astype(jnp.float32)
    terms_MKD = terms_AD.reshape(tokens.shape[0], -1, cotangent_PD.shape[1])
    return jnp.sum(terms_MKD, axis=1).astype(cotangent_PD.dtype), None


tokens_to_slots.defvjp(_tokens_forward, _tokens_backward)


@jax.custom_vjp
def slots_to_assignments(y_PD: jax.Array, slots: Slots) -> jax.Array:
    """Returns the row of each assignment, [A, D]; zeros for an expert of another device."""
    return _take_rows(y_PD, slots.slot_A)


def _results_forward(y_PD: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
    return slots_to_assignments(y_PD, slots), slots


def _results_backward(slots: Slots, cotangent_AD: jax.Array) -> tuple[jax.Array, None]:
    return _take_rows(cotangent_AD, slots.assignment_P), None


slots_to_assignments.defvjp(_results_forward, _results_backward)
