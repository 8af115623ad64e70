"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import optax
from pydantic import Field, PositiveFloat

from lm_trainer.optim.base import (
    OptimizerConfig,
    clip_by_given_norm,
    scale_by_given_learning_rate,
)
from lm_trainer.optim.params import Params


class AdamConfig(OptimizerConfig):
    """AdamW with clipping of the gradient's global norm."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        **OptimizerConfig.refused_keys,
        **dict.fromkeys(
            ("nesterov", "update_rms_clipping", "clip_update_norm", "skip_bad_steps", "adamc_weight_decay"),
            "not available yet",
        ),
    }

    type: Literal["adam"] = "adam"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: PositiveFloat | None = 1.0
    """The gradient is scaled down to this global norm; null: no clipping."""

    @property
    def elementwise(self) -> bool:
        return True

    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Clip, Adam's direction, plus weight decay, times minus the learning rate."""
        return optax.chain(
            clip_by_given_norm(self.max_grad_norm),
            optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon),
            optax.add_decayed_weights(self.weight_decay, mask=self.decay_mask(params)),
            scale_by_given_learning_rate(),
        )
