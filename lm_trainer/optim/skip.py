"""Skips bad steps, whose loss or gradient norm is far above previous steps."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.history import History
from lm_trainer.optim.params import Arrays
from lm_trainer.optim.safeguards import SkipStepConfig


class SkipState(NamedTuple):
    """State of an optimizer that skips bad steps."""

    losses: History
    """Finite losses of the most recent steps, including skipped steps."""
    grad_norms: History
    """Finite global gradient norms of the most recent steps, including skipped steps."""
    skipped_steps: jax.Array
    """int32 []; number of skipped steps so far."""
    inner: PyTree
    """State of the wrapped rule."""


def skip_bad_steps(
    inner: optax.GradientTransformationExtraArgs, config: SkipStepConfig
) -> optax.GradientTransformationExtraArgs:
    """Wraps an update rule. Reads the arguments `loss`, `grad_norm` and `weight` of `update`.

    `weight` is the sum of the weights of the batch; None means that it is known to be positive.
    """
    window = config.rolling_interval_length

    def init(params: Arrays) -> SkipState:
        return SkipState(History.empty(window), History.empty(window), jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: Arrays,
        state: SkipState,
        params: Arrays | None = None,
        /,
        *,
        loss: jax.Array,
        grad_norm: jax.Array,
        weight: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[Arrays, SkipState]:
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # If all weights of a batch are 0, the loss is 0 by definition, which is not comparable with other steps.
        empty = jnp.asarray(False) if weight is None else weight == 0
        # Compared with previous steps only: this step enters the history below, whether or not it is taken.
        usual = (loss <= state.losses.limit(config.sigma_factor)) & (
            grad_norm <= state.grad_norms.limit(config.sigma_factor)
        )
        take = finite & (usual | empty)
        arguments = {**extra_args, "loss": loss, "grad_norm": grad_norm, "weight": weight}
        new_updates, new_inner = inner.update(updates, state.inner, params, **arguments)
        # Selected instead of multiplied by 0, because NaN times 0 is NaN.
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
