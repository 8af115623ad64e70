"""Configuration that optimizers share which orthogonalise the momentum of matrices and update the rest by AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.matrix_rate import MatrixRateConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class OrthogonalConfig(MatrixRateConfig):
    """Keys and parts of the update rule of Muon and its variants.

    The matrix of each layer is orthogonalised separately; the heads of an attention matrix are orthogonalised together.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {**OptimizerConfig.refused_keys, "lr": "use `learning_rate`"}

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate of each parameter."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of gradients of matrices."""
    nesterov: bool = True
    """Use Nesterov momentum for matrices: look one step ahead with the momentum."""
    backend_steps: PositiveInt = 5
    """Number of Newton-Schulz iterations; five bring nearly all singular values to between 0.7 and 1.2."""
    muon_epsilon: PositiveFloat = 1e-8
    """Added to the norm of a matrix before the iterations."""

    def orthogonal_momentum(self, params: Params) -> optax.GradientTransformation:
        """Returns the rule of matrices: the orthogonalised momentum."""
        from lm_trainer.optim.matrices import orthogonalise_momentum

        return orthogonalise_momentum(
            params,
            momentum=self.momentum,
            nesterov=self.nesterov,
            steps=self.backend_steps,
            epsilon=self.muon_epsilon,
        )
