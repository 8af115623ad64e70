"""Lion: updates by the sign of an interpolation between momentum and gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ()

    type: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate. The paper uses 3 to 10 times less than for AdamW, such as 1e-4, and a weight decay that is
    larger by the same factor."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the momentum in the sum whose sign is taken."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum; the paper uses 0.99, and 0.95 to 0.98 if training is unstable."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the sign of beta1 * momentum + (1 - beta1) * gradient."""
        import optax

        del params
        return optax.scale_by_lion(b1=self.beta1, b2=self.beta2)
