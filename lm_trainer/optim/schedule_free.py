"""Schedule-Free AdamW: averaging of the weights in place of a decay of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.decay_shape import DecayShape
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import jax
    import optax
    from optax.contrib import ScheduleFreeState


class ScheduleFreeConfig(OptimizerConfig):
    """Schedule-Free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1).

    Three sequences of weights: z, the steps of the base optimizer; x, their weighted average, which is evaluated and
    exported; and y = (1 - beta1) z + beta1 x between them, which is trained and at which gradients are taken.
    """

    elementwise_transform: ClassVar[bool] = True
    weights_in_state: ClassVar[bool] = True

    type: Literal["schedule_free"] = "schedule_free"
    learning_rate: PositiveFloat = 6e-4
    """The peak learning rate. The paper finds 1 to 10 times that of AdamW best, 0.0025 for nanoGPT."""
    lr_schedule: DecayShape = "constant"
    """The shape of the decay; no decay is needed."""
    beta1: float = Field(default=0.9, gt=0, lt=1)
    """The part of x in y: how far y lies from z towards x."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_lr_power: NonNegativeFloat = 2.0
    """A step counts in the average with this power of the largest learning rate so far."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update without momentum: its place is taken by the distance of y from z."""
        import optax

        del params
        return optax.scale_by_rms(decay=self.beta2, eps=self.epsilon, eps_in_sqrt=False, bias_correction=True)

    def rule(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the update of y, which follows from a step of the base optimizer on z."""
        import jax
        import jax.numpy as jnp
        import optax
        from optax.contrib import ScheduleFreeState

        base = super().rule(params)

        def init(weights: Any) -> ScheduleFreeState:
            # float32 whatever the weights are: in bfloat16 the sum of the steps' weights would soon stop growing.
            return ScheduleFreeState(
                b1=jnp.float32(self.beta1),
                weight_sum=jnp.float32(0.0),
                step_count=jnp.int32(1),
                max_lr=jnp.float32(0.0),
                base_optimizer_state=base.init(weights),
                # A copy: state and weights are donated to one program, which must not be given one buffer twice.
                z=jax.tree.map(jnp.copy, weights),
            )

        def update(
            updates: Any, state: Any, weights: Any = None, /, *, learning_rate: jax.Array, **extra_args: Any
        ) -> tuple[Any, Any]:
            # Made anew at each step, because optax takes the learning rate here, and ours is an argument of the step.
            # x is in no state: optax computes it from y and z, to save the memory of one more copy of the weights.
            free = optax.contrib.schedule_free(base, learning_rate, b1=self.beta1, weight_lr_power=self.weight_lr_power)
            return free.update(updates, state, weights, learning_rate=learning_rate, **extra_args)

        return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

    def eval_params(self, params: Any, opt_state: Any) -> Any:
        """Returns the average x = (y - (1 - beta1) z) / beta1."""
        import jax
        import optax

        z = optax.tree_utils.tree_get(opt_state, "z")
        return jax.tree.map(lambda y, z: ((y - (1 - self.beta1) * z) / self.beta1).astype(y.dtype), params, z)
