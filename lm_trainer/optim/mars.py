"""MARS: Adam applied to gradients whose variance is reduced with the previous gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Arrays, Params

if TYPE_CHECKING:
    import optax


class MarsConfig(OptimizerConfig):
    """MARS-AdamW (Yuan et al. 2024, arXiv 2411.10438, algorithms 1 and 2), in its approximate form.

    The approximate form uses the previous gradient instead of the gradient of the current batch at the previous
    weights, which would cost a second gradient.
    """

    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)
    transfers: ClassVar[bool] = True

    type: Literal["mars"] = "mars"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate. The paper uses 6e-3 for a model of 125 million parameters and 3e-3 for one of 355 million."""
    beta1: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of corrected gradients."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average of squared corrected gradients."""
    gamma: NonNegativeFloat = 0.025
    """Strength of the correction, which is gamma * beta1 / (1 - beta1) times the change of the gradient."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global norm of the corrected gradient; a larger one is scaled down to it. null: no clipping."""

    @property
    def elementwise(self) -> bool:
        return self.max_grad_norm is None and self.clip_update_norm is None

    def build_one(self, name: str, params: Params) -> optax.GradientTransformationExtraArgs | None:
        """Returns None if the corrected gradient is clipped, because that norm is over all parameters."""
        return super().build_one(name, params) if self.max_grad_norm is None else None

    def transfer_problem(self) -> str | None:
        """Describes the reason why `parametrization` has no rule for clipping of the corrected gradient."""
        if self.max_grad_norm is None:
            return None
        return "it clips corrected gradients of all parameters together; set optimizer.max_grad_norm: null"

    def clip_rule(self) -> optax.GradientTransformation:
        """Returns a transformation without effect, because `transform` clips the corrected gradient."""
        import optax

        return optax.identity()

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update, computed from corrected gradients."""
        import optax

        del params
        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        return optax.chain(_correct_gradient(self.gamma * self.beta1 / (1 - self.beta1), self.max_grad_norm), adam)


class CorrectionState(NamedTuple):
    """State of the correction."""

    previous: Arrays
    """Gradient of the previous step, neither corrected nor clipped; 0 at the first step."""


def _correct_gradient(strength: float, max_norm: float | None) -> optax.GradientTransformation:
    """Adds `strength` times the change of the gradient, and then scales the sum down to the global norm `max_norm`."""
    import jax
    import jax.numpy as jnp
    import optax

    from lm_trainer.optim.clip import global_norm

    def init(params: Arrays) -> CorrectionState:
        return CorrectionState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Arrays, state: CorrectionState, params: Arrays | None = None) -> tuple[Arrays, CorrectionState]:
        del params
        corrected = jax.tree.map(lambda g, previous: g + strength * (g - previous), updates, state.previous)
        if max_norm is not None:
            # Computed here from unsharded arrays, because the norm passed by the step is the norm of g, not of c.
            scale = jnp.minimum(1.0, max_norm / jnp.maximum(global_norm(corrected), 1e-12))
            corrected = jax.tree.map(lambda c: c * scale.astype(c.dtype), corrected)
        return corrected, CorrectionState(updates)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
