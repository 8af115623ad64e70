"""Sophia: momentum divided by an estimate of the curvature, clipped elementwise.

The curvature is the diagonal of the Hessian H. `lm_trainer/nn/curvature.py` has two estimates of it, each at the cost
of one or two gradients:

- Hutchinson: u * (H u), where u is random, with uncorrelated elements of variance 1;
- Gauss-Newton-Bartlett: g * g times the number of targets, where g is the mean gradient on targets sampled from the
  model.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.params import Arrays, Params
from lm_trainer.optim.sophia import SophiaConfig


class SophiaState(NamedTuple):
    """State of Sophia."""

    count: jax.Array
    """int32 []; number of updates so far."""
    mu: Arrays
    """Average of gradients, in the shapes of the parameters."""
    curvature: Arrays
    """Average of the estimates of the diagonal of the Hessian, in the shapes of the parameters."""


def scale_by_sophia(config: SophiaConfig, params: Params) -> optax.GradientTransformationExtraArgs:
    """Returns the update clip(m / max(gamma h, epsilon)), with m corrected for its initial 0.

    Its `update` takes `curvature`, which is the sums of the estimator over the batch or None, and `weight`, the float32
    sum of the weights of the batch. h is updated before it is used, so every step has an estimate.
    """
    del params

    def init(like: Arrays) -> SophiaState:
        zeros = optax.tree.zeros_like(like)
        return SophiaState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        grads: Arrays,
        state: SophiaState,
        _: Arrays | None = None,
        *,
        curvature: Arrays | None = None,
        weight: PyTree = None,
        **extra_args: PyTree,
    ) -> tuple[Arrays, SophiaState]:
        del extra_args
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, config.beta1, 1)
        h = state.curvature
        # Decided during tracing: steps with and without an estimate are two separate programs.
        if curvature is not None:
            h = jax.tree.map(
                functools.partial(_update_average, config), h, _hessian_diagonal(config, curvature, weight)
            )
        return jax.tree.map(
            functools.partial(_compute_update, config), optax.tree.bias_correction(mu, config.beta1, count), h
        ), SophiaState(count, mu, h)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _hessian_diagonal(config: SophiaConfig, sums: Arrays, weight: jax.Array) -> Arrays:
    """Estimates the diagonal of the Hessian of the mean loss from sums over the batch."""
    if config.curvature == "hutchinson":
        return jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
    # weight * (g / weight)^2, rearranged so that it divides only once.
    return jax.tree.map(lambda g: jnp.square(g) / weight.astype(g.dtype), sums)


def _update_average(config: SophiaConfig, h: jax.Array, estimate: jax.Array) -> jax.Array:
    # The check of loss and gradient does not cover this estimate, so non-finite estimates must be kept out of the
    # average. They also occur as a division by 0 if all weights of a batch are 0.
    return jnp.where(jnp.isfinite(estimate), config.beta2 * h + (1 - config.beta2) * estimate, h)


def _compute_update(config: SophiaConfig, m: jax.Array, h: jax.Array) -> jax.Array:
    # If the curvature is small or negative, the quotient is huge and is clipped to its sign, so the element moves by a
    # fixed distance, as in sign descent.
    u = m / jnp.maximum(config.gamma * h, config.epsilon)
    return u if config.clip_threshold is None else jnp.clip(u, -config.clip_threshold, config.clip_threshold)
