"""AdamH: Adam on matrices of constant norm, AdamW for everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from lm_trainer.optim.constant_norm import ConstantNormConfig
from lm_trainer.optim.matrix_rate import MatrixRateConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class AdamHConfig(ConstantNormConfig, MatrixRateConfig):
    """Adam Hyperball (Wen et al. 2026, arXiv 2606.16899)."""

    type: Literal["adamh"] = "adamh"
    learning_rate: PositiveFloat = 0.02
    """Peak angle of a step of a matrix, in radians. A good start is sqrt(rate x weight decay) of a run with AdamW."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update of all parameters."""
        del params
        return self.adam()
