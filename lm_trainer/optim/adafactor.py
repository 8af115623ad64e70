"""Adafactor: second moments of matrices are stored as the product of a row and a column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5).

    The matrix of each layer has a separate row and column; heads and head size count as one dimension.
    """

    type: Literal["adafactor"] = "adafactor"
    learning_rate: PositiveFloat = 1e-2
    """Peak learning rate, relative to the size of each weight unless multiply_by_parameter_scale is false. The paper
    uses min(1e-2, 1 / sqrt(step))."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum global norm of the gradient; a gradient with a larger norm is scaled down to it. null: no clipping."""
    decay_rate: float = Field(default=0.8, gt=0, le=1)
    """At step t, starting from 1, the second moment decays by 1 - t^-decay_rate."""
    beta1: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the average of updates; 0: no average, which saves the memory of the average."""
    epsilon: PositiveFloat = 1e-30
    """Added to the squared gradients."""
    clipping_threshold: PositiveFloat | None = 1.0
    """Maximum root mean square of the update of each weight; a larger update is scaled down to it. null: no
    clipping."""
    multiply_by_parameter_scale: bool = True
    """Multiply the update by the root mean square of the weight, or by 1e-3 if that is larger."""
    min_dim_size_to_factor: PositiveInt = 128
    """Matrices with fewer rows or columns than this have a second moment for each element."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the gradient over the root of its factored second moment, clipped and scaled to the weight."""
        from lm_trainer.optim.adafactor_update import scale_by_adafactor

        return scale_by_adafactor(self, params)
