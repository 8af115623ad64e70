"""Dion: low-rank orthonormal updates of matrices with error feedback, AdamW for everything else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.optim.matrix_rate import MatrixRateConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class DionConfig(MatrixRateConfig):
    """Dion (Ahn et al. 2025, arXiv 2504.05295, algorithm 1), for the matrix of each layer.

    The update is scaled by sqrt(outputs / inputs), as in the paper's experiments.
    """

    # Rounding the momentum to 8 bits would destroy what error feedback saves in it.
    squares_in_state: ClassVar[tuple[str, ...] | None] = None

    type: Literal["dion"] = "dion"
    learning_rate: PositiveFloat = 0.01
    """Peak learning rate of matrices."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Part of the applied directions that stays in the momentum; what was not applied stays in full."""
    rank_fraction: float = Field(default=0.25, gt=0, le=1)
    """Rank of an update, as a fraction of the smaller side of the matrix, rounded up."""
    dion_epsilon: PositiveFloat = 1e-8
    """Added to the norm of each direction before the division by it."""

    def matrix_update_norm(self, inputs: int, outputs: int) -> float:
        """Returns the spectral norm of an update of a matrix at a learning rate of 1, up to a constant factor."""
        return math.sqrt(outputs / inputs)

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the scaled low-rank update of matrices, and Adam's update of the rest."""
        from lm_trainer.optim.dion_update import scale_by_dion
        from lm_trainer.optim.matrices import split_by_role

        dion = scale_by_dion(
            params, momentum=self.momentum, rank_fraction=self.rank_fraction, epsilon=self.dion_epsilon
        )
        return split_by_role(params, dion, self.adam())
