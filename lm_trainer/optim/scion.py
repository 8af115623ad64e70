"""Scion: takes the steepest step within the unit ball of a norm that is chosen for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class ScionConfig(OptimizerConfig):
    """Unconstrained Scion (Pethick et al. 2025, arXiv 2502.07529, algorithm 1).

    The spectral norm is used for matrices of hidden layers. For all other parameters it is the largest absolute value,
    which makes their update a sign.

    The update of a matrix is scaled by sqrt(max(1, outputs / inputs)), as in Levanter, and signs are not scaled. The
    paper scales by sqrt(outputs / inputs) for hidden layers and by 1 / inputs for the head.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {**OptimizerConfig.refused_keys, "lr": "use `learning_rate`"}
    squares_in_state: ClassVar[tuple[str, ...] | None] = ()
    transfers: ClassVar[bool] = True

    type: Literal["scion"] = "scion"
    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of matrices."""
    scion_to_signum_lr: PositiveFloat = 0.25
    """Learning rate of embeddings, heads, biases and scales of norms, as a fraction of `learning_rate`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate of each parameter."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of gradients of matrices."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of gradients of all other parameters."""
    backend_steps: PositiveInt = 10
    """Number of Newton-Schulz iterations."""
    scion_epsilon: PositiveFloat = 1e-8
    """Added to the norm of a matrix before the iterations."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns updates in the direction of the average gradient.

        For matrices this is the orthogonalised average times sqrt(max(1, outputs / inputs)); otherwise it is the sign
        of the average.
        """
        import optax

        from lm_trainer.optim.matrices import orthogonalise_momentum, scale_each, split_by_role, width_factors

        # Both are the point of the norm's unit ball that is farthest along the gradient: U V^T for the spectral norm.
        spectral = orthogonalise_momentum(
            params, momentum=self.momentum, nesterov=False, steps=self.backend_steps, epsilon=self.scion_epsilon
        )
        sign = optax.chain(optax.ema(self.beta1, debias=False), optax.scale_by_sign())
        return optax.chain(split_by_role(params, spectral, sign), scale_each(width_factors(params)))

    def matrix_update_norm(self, inputs: int, outputs: int) -> float:
        """Returns the spectral norm of an update of a matrix at a learning rate of 1, up to a constant factor."""
        return math.sqrt(max(1.0, outputs / inputs))

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Adds the weight decay, then scales the learning rate of non-matrices by `scion_to_signum_lr`."""
        import optax

        from lm_trainer.optim.matrices import scale_non_matrices

        return optax.chain(super().decay_rule(params), scale_non_matrices(params, self.scion_to_signum_lr))
