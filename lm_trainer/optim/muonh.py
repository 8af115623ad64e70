"""MuonH: Muon on matrices of constant norm, AdamW for everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from lm_trainer.optim.constant_norm import ConstantNormConfig
from lm_trainer.optim.orthogonal import OrthogonalConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class MuonHConfig(ConstantNormConfig, OrthogonalConfig):
    """Muon Hyperball (Wen et al. 2026, arXiv 2606.16899), with the momentum of `muon`."""

    type: Literal["muonh"] = "muonh"
    learning_rate: PositiveFloat = 0.02
    """Peak angle of a step of a matrix, in radians. A good start is sqrt(rate x weight decay) of a run with Muon."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the orthogonalised momentum of matrices, and Adam's update of the rest."""
        from lm_trainer.optim.matrices import split_by_role

        return split_by_role(params, self.orthogonal_momentum(params), self.adam())
