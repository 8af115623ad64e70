"""Muon: orthogonalised momentum for the matrices of hidden layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with the momentum of optax.contrib.muon.

    With nesterov, both the average and the gradient are corrected for the bias of the first steps, and the average for
    one step more: (b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t)), where Jordan's code has b m + (1 - b) g. The
    directions differ by a few percent in the first steps, and agree later.

    The matrix of each layer is orthogonalised separately; the heads of an attention matrix are orthogonalised together.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {**OptimizerConfig.refused_keys, "lr": "use `learning_rate`"}
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)

    type: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of matrices. With use_kimi_scaling, use a learning rate that suits AdamW, such as 6e-4."""
    adam_lr: PositiveFloat = 6e-4
    """Peak learning rate of embeddings, heads, biases and scales of norms. It follows the same schedule."""
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
    use_kimi_scaling: bool = False
    """Multiply the orthogonal update by 0.2 sqrt(max(inputs, outputs)), which gives it the size of an AdamW update (Liu
    et al. 2025, arXiv 2502.16982), instead of by sqrt(max(1, outputs / inputs))."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the orthogonalised momentum of matrices, scaled by their shape, and Adam's update of the rest."""
        import optax

        from lm_trainer.optim.matrices import (
            orthogonalise_momentum,
            rms_factors,
            scale_each,
            split_by_role,
            width_factors,
        )

        momentum = orthogonalise_momentum(
            params,
            momentum=self.momentum,
            nesterov=self.nesterov,
            steps=self.backend_steps,
            epsilon=self.muon_epsilon,
        )
        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        # 0.2 is about the root mean square of AdamW's updates in training, so learning rates for AdamW apply (Liu et
        # al. 2025).
        factors = rms_factors(params, 0.2) if self.use_kimi_scaling else width_factors(params)
        return optax.chain(split_by_role(params, momentum, adam), scale_each(factors))

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Adds the weight decay, and then scales the learning rate of all parameters except matrices to `adam_lr`."""
        import optax

        from lm_trainer.optim.matrices import scale_non_matrices

        # Applied after the decay, so that the decay is multiplied by the learning rate of the parameter too.
        return optax.chain(super().decay_rule(params), scale_non_matrices(params, self.adam_lr / self.learning_rate))
