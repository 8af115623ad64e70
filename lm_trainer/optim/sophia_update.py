"""Sophia: momentum divided by an estimate of the curvature, clipped element by element.

The curvature is the diagonal of the Hessian H. `lm_trainer/nn/curvature.py` has two estimates of it, each for the price
of one or two gradients:

- Hutchinson: u * (H u) for random u whose numbers are uncorrelated and have variance 1;
- Gauss-Newton-Bartlett: g * g times the number of targets, g the mean gradient for targets that the model draws.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.optim.params import Params
from lm_trainer.optim.sophia import SophiaConfig


class SophiaState(NamedTuple):
    """State of Sophia."""

    count: jax.Array
    """int32 [], updates so far."""
    mu: Any
    """The average of gradients, like the parameters."""
    curvature: Any
    """The average of the estimates of the Hessian's diagonal, like the parameters."""


def scale_by_sophia(config: SophiaConfig, params: Params) -> optax.GradientTransformationExtraArgs:
    """Returns clip(m / max(gamma h, epsilon)), with m corrected for its start at 0.

    Its `update` takes `curvature`, None or the sums that the estimator gives for the whole batch, and `weight`, the
    float32 sum of the batch's weights. h is averaged before it is used, so that no step lacks an estimate.
    """
    del params

    def init(like: Any) -> SophiaState:
        zeros = optax.tree.zeros_like(like)
        return SophiaState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        grads: Any,
        state: SophiaState,
        _: Any = None,
        *,
        curvature: Any = None,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, SophiaState]:
        del extra_args
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, config.beta1, 1)
        h = state.curvature
        # Decided while tracing: a step with an estimate and one without are two programs.
        if curvature is not None:
            h = jax.tree.map(functools.partial(_average, config), h, _diagonal(config, curvature, weight))
        return jax.tree.map(
            functools.partial(_step, config), optax.tree.bias_correction(mu, config.beta1, count), h
        ), SophiaState(count, mu, h)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _diagonal(config: SophiaConfig, sums: Any, weight: jax.Array) -> Any:
    """The estimate of the diagonal of the mean loss's Hessian, from sums over the batch."""
    if config.curvature == "hutchinson":
        return jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
    # weight * (g / weight)^2, in the order that divides once.
    return jax.tree.map(lambda g: jnp.square(g) / weight.astype(g.dtype), sums)


def _average(config: SophiaConfig, h: jax.Array, estimate: jax.Array) -> jax.Array:
    # The check of loss and gradient does not see this estimate: one that is not finite must not enter the average,
    # nor that of a batch in which nothing has a weight, which is a division by 0.
    return jnp.where(jnp.isfinite(estimate), config.beta2 * h + (1 - config.beta2) * estimate, h)


def _step(config: SophiaConfig, m: jax.Array, h: jax.Array) -> jax.Array:
    # Where the curvature is small or negative the quotient is huge, and the clip makes a sign of it: such a number
    # moves by a fixed size, as in sign descent.
    u = m / jnp.maximum(config.gamma * h, config.epsilon)
    return u if config.clip_threshold is None else jnp.clip(u, -config.clip_threshold, config.clip_threshold)
