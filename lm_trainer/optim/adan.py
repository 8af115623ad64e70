"""Adan: Adam with Nesterov momentum that is estimated from differences of gradients."""

from __future__ import annotations

from typing import ClassVar, Literal

import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params


class AdanConfig(OptimizerConfig):
    """Adan (Xie et al. 2022, arXiv 2208.06677, algorithm 1), but with the weight decay of AdamW."""

    elementwise_transform: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("n",)

    type: Literal["adan"] = "adan"
    learning_rate: PositiveFloat = 6e-4
    """The peak learning rate. The paper takes 5 to 10 times more than for AdamW."""
    weight_decay: NonNegativeFloat = 0.02
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.92, ge=0, lt=1)
    """Decay of the average of differences of successive gradients."""
    beta3: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average of squares."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the average of squares."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns (m + (1 - beta2) v) / (sqrt(n) + epsilon): averages of gradients, of differences, and of squares."""
        del params
        return optax.scale_by_adan(b1=self.beta1, b2=self.beta2, b3=self.beta3, eps=self.epsilon)
