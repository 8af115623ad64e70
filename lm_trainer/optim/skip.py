"""Skipping of bad steps, those whose loss or gradient norm is far above that of the steps before."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.optim.history import History
from lm_trainer.optim.safeguards import SkipStepConfig


class SkipState(NamedTuple):
    """State of an optimizer that skips."""

    losses: History
    """Finite losses of the last steps, skipped ones included."""
    grad_norms: History
    """The same of the gradient's global norm."""
    skipped_steps: jax.Array
    """int32 [], the number of them so far."""
    inner: Any
    """State of the rule that is wrapped."""


def skip_bad_steps(
    inner: optax.GradientTransformationExtraArgs, config: SkipStepConfig
) -> optax.GradientTransformationExtraArgs:
    """Wraps a whole update rule; reads the arguments `loss`, `grad_norm` and `weight` of `update`.

    `weight` is the sum of the batch's weights; None of a batch that is known to have some.
    """
    window = config.rolling_interval_length

    def init(params: Any) -> SkipState:
        return SkipState(History.empty(window), History.empty(window), jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: Any,
        state: SkipState,
        params: Any = None,
        /,
        *,
        loss: jax.Array,
        grad_norm: jax.Array,
        weight: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Any, SkipState]:
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # The loss of a batch without a token that counts is 0 by definition, which says nothing of other steps.
        empty = jnp.asarray(False) if weight is None else weight == 0
        # Compared with the steps before: this one enters the history below, taken or not.
        usual = (loss <= state.losses.limit(config.sigma_factor)) & (
            grad_norm <= state.grad_norms.limit(config.sigma_factor)
        )
        take = finite & (usual | empty)
        given = {**extra_args, "loss": loss, "grad_norm": grad_norm, "weight": weight}
        new_updates, new_inner = inner.update(updates, state.inner, params, **given)
        # Selected, not multiplied by 0: a NaN times 0 is a NaN.
        return (
            jax.tree.map(lambda u: jnp.where(take, u, jnp.zeros_like(u)), new_updates),
            SkipState(
                losses=state.losses.push(loss, finite & ~empty),
                grad_norms=state.grad_norms.push(grad_norm, finite & ~empty),
                skipped_steps=state.skipped_steps + jnp.where(take, 0, 1).astype(jnp.int32),
                inner=jax.tree.map(lambda new, old: jnp.where(take, new, old), new_inner, state.inner),
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
