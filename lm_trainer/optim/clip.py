"""Clipping of the gradient to a given norm, and of the update based on the norms of previous updates."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.history import History
from lm_trainer.optim.params import Arrays, Params
from lm_trainer.optim.safeguards import ClipUpdateNormConfig
from lm_trainer.parallel.tree_sum import tree_sum


class ClipUpdateState(NamedTuple):
    """State of the clipping of updates."""

    norms: History
    """Norms of the most recent updates, before clipping."""
    update_norm: jax.Array
    """float32 []; norm of the most recent update, before clipping."""


def clip_update_norm(config: ClipUpdateNormConfig) -> optax.GradientTransformationExtraArgs:
    """Clips updates based on the history of their norms. A non-finite update becomes 0; the state keeps its values."""

    def init(params: Arrays) -> ClipUpdateState:
        del params
        return ClipUpdateState(History.empty(config.rolling_interval_length), jnp.zeros((), jnp.float32))

    def update(
        updates: Arrays, state: ClipUpdateState, params: Arrays | None = None, /, **extra_args: PyTree
    ) -> tuple[Arrays, ClipUpdateState]:
        del params, extra_args
        norm = global_norm(updates)
        finite = jnp.isfinite(norm)
        # The minimum of 1e-12 prevents 0 / 0 for an update of 0.
        scale = jnp.minimum(1.0, state.norms.limit(config.sigma_factor) / jnp.maximum(norm, 1e-12))
        clipped = jax.tree.map(lambda u: jnp.where(finite, u * scale.astype(u.dtype), jnp.zeros_like(u)), updates)
        return clipped, ClipUpdateState(state.norms.push(norm, finite), jnp.where(finite, norm, state.update_norm))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def clip_update_rms(threshold: float, params: Params) -> optax.GradientTransformation:
    """Scales the update of each weight, and of each layer of a stack, down to the root mean square `threshold`."""

    def update(updates: Arrays, state: optax.OptState, _: Arrays | None = None) -> tuple[Arrays, optax.OptState]:
        def clip_update(name: str, u: jax.Array) -> jax.Array:
            axes = tuple(range(params[name].lead, u.ndim))
            rms = jnp.sqrt(jnp.mean(jnp.square(u.astype(jnp.float32)), axis=axes, keepdims=True))
            # max(1, ...), because updates are only scaled down: an update below the threshold is not changed.
            return u / jnp.maximum(1.0, rms / threshold).astype(u.dtype)

        return {name: clip_update(name, u) for name, u in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def global_norm(tree: PyTree) -> jax.Array:
    """Returns the float32 norm over all leaves. Only for arrays that are not sharded on any device."""
    # The sums of the parameters are added by a tree in a fixed order, which must not depend on XLA's fusions.
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(tree_sum(jnp.stack(squares)))


def clip_by_given_norm(max_norm: float | None) -> optax.GradientTransformationExtraArgs:
    """Scales the gradient down to the global norm `max_norm`; `update` gets the actual norm as `grad_norm`."""
    if max_norm is None:
        return optax.with_extra_args_support(optax.identity())

    def update(
        updates: Arrays,
        state: optax.OptState,
        params: Arrays | None = None,
        /,
        *,
        grad_norm: jax.Array,
        **extra_args: PyTree,
    ) -> tuple[Arrays, optax.OptState]:
        del params, extra_args
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(grad_norm, 1e-12))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
