"""ADOPT: Adam that normalises a gradient by the previous second moment, which is not correlated with the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class AdoptConfig(OptimizerConfig):
    """ADOPT (Taniguchi et al. 2024, arXiv 2411.02853, algorithm 2).

    The first step only computes second moments: except for weight decay, it does not change the weights.
    """

    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)

    type: Literal["adopt"] = "adopt"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of normalised gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients; the paper uses 0.9999."""
    epsilon: PositiveFloat = 1e-6
    """Minimum of the root of the second moment."""
    use_clipping: bool = True
    """Clip each element of the normalised gradient to the fourth root of the number of steps so far."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the average of gradient / max(sqrt(v), epsilon), where v is from the previous step."""
        import optax

        del params
        return optax.contrib.scale_by_adopt(
            b1=self.beta1, b2=self.beta2, eps=self.epsilon, use_clipping=self.use_clipping
        )
