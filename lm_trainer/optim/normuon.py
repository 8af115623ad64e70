"""NorMuon: Muon whose orthogonal updates are normalised for each neuron, AdamW for everything else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.optim.orthogonal import OrthogonalConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class NorMuonConfig(OrthogonalConfig):
    """NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1).

    It has the same momentum as `muon`. The paper's algorithm has plain momentum, and the authors' code Nesterov's.
    """

    type: Literal["normuon"] = "normuon"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate of matrices. It suits AdamW too, because updates have the size of AdamW's."""
    neuron_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared orthogonal updates of a neuron."""
    neuron_epsilon: PositiveFloat = 1e-8
    """Added to the root of this average."""

    def matrix_update_norm(self, inputs: int, outputs: int) -> float:
        """Returns the spectral norm of an update of a matrix at a learning rate of 1, up to a constant factor."""
        # Its root mean square is constant, and its rank is the smaller size.
        return math.sqrt(max(inputs, outputs))

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the normalised orthogonal momentum of matrices, and Adam's update of the rest."""
        import optax

        from lm_trainer.optim.matrices import split_by_role
        from lm_trainer.optim.normuon_update import normalise_neurons

        matrices = optax.chain(
            self.orthogonal_momentum(params),
            normalise_neurons(params, beta2=self.neuron_beta2, epsilon=self.neuron_epsilon),
        )
        return split_by_role(params, matrices, self.adam())
