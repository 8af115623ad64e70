"""Sophia: momentum divided by an estimate of the curvature, clipped elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.optimizer import Curvature
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class SophiaConfig(OptimizerConfig):
    """Configuration keys and update rule of both variants of Sophia (Liu et al. 2023, arXiv 2305.14342, algorithm 3).

    Unlike in the paper, the momentum is corrected for its initial 0, as in Levanter and optax.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        **OptimizerConfig.refused_keys,
        "rng_seed": "the random numbers of the estimate follow from `trainer.seed`",
    }
    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True

    beta1: float = Field(default=0.96, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average of curvature estimates, applied at each estimate."""
    epsilon: PositiveFloat = 1e-12
    """Minimum of the divisor of the momentum."""
    clip_threshold: PositiveFloat | None = 1.0
    """Maximum absolute value of an element of the update, before the learning rate; null: no clipping."""
    gamma: PositiveFloat = 0.01
    """Factor that multiplies the curvature; larger values clip fewer elements."""
    update_interval: PositiveInt = 10
    """Number of steps from one curvature estimate to the next. The first is computed at the first step."""

    @property
    def curvature_interval(self) -> int:
        return self.update_interval

    def transform(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the update clip(m / max(gamma h, epsilon)), with m corrected for its initial 0.

        Its `update` takes `curvature`, which is the sums of the estimator over the batch or None, and `weight`, the
        float32 sum of the weights of the batch. h is updated before it is used, so every step has an estimate.
        """
        from lm_trainer.optim.sophia_update import scale_by_sophia

        return scale_by_sophia(self, params)


class SophiaHConfig(SophiaConfig):
    """Sophia with Hutchinson's estimate of the diagonal of the Hessian, which is unbiased and can have either sign."""

    type: Literal["sophia-h"] = "sophia-h"

    @property
    def curvature(self) -> Curvature:
        return "hutchinson"


class SophiaGConfig(SophiaConfig):
    """Sophia with the Gauss-Newton-Bartlett estimate, from targets sampled from the model; cheaper, never negative."""

    type: Literal["sophia-g"] = "sophia-g"
    gamma: PositiveFloat = 0.05
    """Factor that multiplies the curvature; larger values clip fewer elements."""

    @property
    def curvature(self) -> Curvature:
        return "gauss_newton_bartlett"
