"""Muon: orthogonalised momentum for the matrices of hidden layers, AdamW for everything else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import PositiveFloat

from lm_trainer.optim.orthogonal import OrthogonalConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class MuonConfig(OrthogonalConfig):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with the momentum of optax.contrib.muon.

    With nesterov, both the average and the gradient are corrected for the bias of the first steps, and the average for
    one step more: (b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t)), where Jordan's code has b m + (1 - b) g. The
    directions differ by a few percent in the first steps, and agree later.
    """

    type: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of matrices. With use_kimi_scaling, use a learning rate that suits AdamW, such as 6e-4."""
    use_kimi_scaling: bool = False
    """Multiply the orthogonal update by 0.2 sqrt(max(inputs, outputs)), which gives it the size of an AdamW update (Liu
    et al. 2025, arXiv 2502.16982), instead of by sqrt(max(1, outputs / inputs))."""
    qk_clip: PositiveFloat | None = None
    """QK-Clip, which makes Muon MuonClip (Kimi K2, arXiv 2507.20534, section 2.1): after each update, scale the query
    and key weights of every head whose largest attention logit in the batch exceeded this limit, so that the logit
    becomes the limit. The paper uses 100. null: no clipping."""

    @property
    def logit_limit(self) -> float | None:
        return self.qk_clip

    def without_logit_limit(self) -> Self:
        return self.model_copy(update={"qk_clip": None})

    def matrix_update_norm(self, inputs: int, outputs: int) -> float:
        """Returns the spectral norm of an update of a matrix at a learning rate of 1, up to a constant factor."""
        scale = max(inputs, outputs) if self.use_kimi_scaling else max(1.0, outputs / inputs)
        return math.sqrt(scale)

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the orthogonalised momentum of matrices, scaled by their shape, and Adam's update of the rest."""
        import optax

        from lm_trainer.optim.matrices import ADAM_RMS, rms_factors, scale_each, split_by_role, width_factors

        factors = rms_factors(params, ADAM_RMS) if self.use_kimi_scaling else width_factors(params)
        return optax.chain(
            split_by_role(params, self.orthogonal_momentum(params), self.adam()),
            scale_each(factors),
        )
