"""Sophia: momentum divided by an estimate of the curvature, clipped element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax

Estimator = Literal["hutchinson", "gauss_newton_bartlett"]


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
        from lm_trainer.optim.sophia_update import scale_by_sophia

        return scale_by_sophia(self, params)


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
