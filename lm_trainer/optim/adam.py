"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.decay import decay_weights
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax


class AdamConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)

    type: Literal["adam", "adamw"] = "adam"
    """`adamw` is another name for `adam`, which has decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    nesterov: bool = False
    """Use Nesterov momentum: look one step ahead with the first moment (Dozat 2016)."""
    update_rms_clipping: PositiveFloat | None = None
    """Maximum root mean square of the update of each weight before weight decay; a larger update is scaled down to it.
    As in StableAdamW (Wortsman et al. 2023, arXiv 2304.13013), but for m / sqrt(v) instead of g / sqrt(v). 1.0 suits
    most models; null: no clipping."""
    adamc_weight_decay: bool = False
    """Multiply the weight decay by learning rate / peak learning rate, so that normalised layers keep a steady ratio of
    gradient to weight as the learning rate falls (Defazio 2025, arXiv 2506.02285)."""

    @field_validator("type")
    @classmethod
    def _has_one_name(cls, value: str) -> str:
        # A run has the same identity under either name.
        return "adam" if value == "adamw" else value

    @property
    def elementwise(self) -> bool:
        return super().elementwise and self.update_rms_clipping is None

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the first moment over the root of the second, both corrected for their initial 0."""
        import optax

        from lm_trainer.optim.clip import clip_update_rms

        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon, nesterov=self.nesterov)
        if self.update_rms_clipping is None:
            return adam
        return optax.chain(adam, clip_update_rms(self.update_rms_clipping, params))

    def decay_rule(self, params: Params) -> optax.GradientTransformation:
        """Adds the weight decay, with or without the correction of AdamC."""
        peak = self.learning_rate if self.adamc_weight_decay else None
        return decay_weights(self.weight_decay, self.decay_mask(params), peak=peak)
