"""Sophia: momentum divided by an estimate of the curvature, clipped element by element.

The curvature is the diagonal of the Hessian H. `lm_trainer/nn/curvature.py` has two estimates of it, each for the price
of one or two gradients:

- Hutchinson: u * (H u) for random u whose numbers are uncorrelated and have variance 1;
- Gauss-Newton-Bartlett: g * g times the number of targets, g the mean gradient for targets that the model draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

Estimator = Literal["hutchinson", "gauss_newton_bartlett"]


class SophiaState(NamedTuple):
    """State of Sophia."""

    count: jax.Array
    """int32 [], updates so far."""
    mu: Any
    """The average of gradients, like the parameters."""
    curvature: Any
    """The average of the estimates of the Hessian's diagonal, like the parameters."""


class SophiaConfig(OptimizerConfig):
    """Keys and rule of both kinds of Sophia (Liu et al. 2023, arXiv 2305.14342, algorithm 3), but with a momentum that
    is corrected for its start at 0, as in Levanter and optax.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        **OptimizerConfig.refused_keys,
        "rng_seed": "the random numbers of the estimate follow from `trainer.seed`",
    }
    elementwise_transform: ClassVar[bool] = True

    beta1: float = Field(default=0.96, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average of curvature estimates, at each estimate."""
    epsilon: PositiveFloat = 1e-12
    """The least that the momentum is divided by."""
    clip_threshold: PositiveFloat | None = 1.0
    """The largest absolute value of the update of a number, before the learning rate; null: no clipping."""
    gamma: PositiveFloat = 0.01
    """Multiplies the curvature: larger values clip fewer numbers."""
    update_interval: PositiveInt = 10
    """Steps from one estimate of the curvature to the next; the first is made at the first step."""

    @property
    def curvature_interval(self) -> int:
        return self.update_interval

    def transform(self, params: Params) -> optax.GradientTransformationExtraArgs:
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
            mu = optax.tree.update_moment(grads, state.mu, self.beta1, 1)
            h = state.curvature
            # Decided while tracing: a step with an estimate and one without are two programs.
            if curvature is not None:
                h = jax.tree.map(self._average, h, self._diagonal(curvature, weight))
            return jax.tree.map(self._step, optax.tree.bias_correction(mu, self.beta1, count), h), SophiaState(
                count, mu, h
            )

        return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

    def _diagonal(self, sums: Any, weight: jax.Array) -> Any:
        """The estimate of the diagonal of the mean loss's Hessian, from sums over the batch."""
        if self.curvature == "hutchinson":
            return jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
        # weight * (g / weight)^2, in the order that divides once.
        return jax.tree.map(lambda g: jnp.square(g) / weight.astype(g.dtype), sums)

    def _average(self, h: jax.Array, estimate: jax.Array) -> jax.Array:
        # The check of loss and gradient does not see this estimate: one that is not finite must not enter the average,
        # nor that of a batch in which nothing has a weight, which is a division by 0.
        return jnp.where(jnp.isfinite(estimate), self.beta2 * h + (1 - self.beta2) * estimate, h)

    def _step(self, m: jax.Array, h: jax.Array) -> jax.Array:
        # Where the curvature is small or negative the quotient is huge, and the clip makes a sign of it: such a number
        # moves by a fixed size, as in sign descent.
        u = m / jnp.maximum(self.gamma * h, self.epsilon)
        return u if self.clip_threshold is None else jnp.clip(u, -self.clip_threshold, self.clip_threshold)


class SophiaHConfig(SophiaConfig):
    """Sophia with Hutchinson's estimate of the Hessian's diagonal: unbiased, and of either sign."""

    type: Literal["sophia-h"] = "sophia-h"

    @property
    def curvature(self) -> Estimator:
        return "hutchinson"


class SophiaGConfig(SophiaConfig):
    """Sophia with the Gauss-Newton-Bartlett estimate, from targets that the model draws: cheaper, never negative."""

    type: Literal["sophia-g"] = "sophia-g"
    gamma: PositiveFloat = 0.05
    """Multiplies the curvature: larger values clip fewer numbers."""

    @property
    def curvature(self) -> Estimator:
        return "gauss_newton_bartlett"
