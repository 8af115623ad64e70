"""RMSProp with momentum, which is an average of normalised gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class RmsPropConfig(OptimizerConfig):
    """RMSProp (Tieleman and Hinton 2012, lecture 6.5), followed by momentum.

    Both averages are corrected for their initial 0.
    """

    renamed_keys: ClassVar[Mapping[str, str]] = {**OptimizerConfig.renamed_keys, "eps": "epsilon"}
    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)

    type: Literal["rmsprop"] = "rmsprop"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of normalised gradients."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-30
    """Added to the root of the average of squared gradients."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the average of gradient / (sqrt(v) + epsilon)."""
        import optax

        del params
        return optax.chain(
            optax.scale_by_rms(decay=self.beta2, eps=self.epsilon, eps_in_sqrt=False, bias_correction=True),
            optax.ema(self.beta1, debias=True),
        )
