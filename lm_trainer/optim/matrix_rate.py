"""Base of optimizers that have one learning rate for the matrices of hidden layers, and one for AdamW on the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class MatrixRateConfig(OptimizerConfig):
    """Two learning rates, which follow the same schedule, and the keys of AdamW."""

    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)
    transfers: ClassVar[bool] = True

    learning_rate: PositiveFloat = 0.02
    """Peak learning rate of matrices."""
    adam_lr: PositiveFloat = 6e-4
    """Peak learning rate of embeddings, heads, biases and scales of norms. It follows the same schedule."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment."""

    def adam(self) -> optax.GradientTransformation:
        """Returns Adam's update."""
        import optax

        return optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Adds the weight decay, and then scales the learning rate of all parameters except matrices to `adam_lr`."""
        import optax

        from lm_trainer.optim.matrices import scale_non_matrices

        # Applied after the decay, so that the decay is multiplied by the learning rate of the parameter too.
        return optax.chain(super().decay_rule(params), scale_non_matrices(params, self.adam_lr / self.learning_rate))
