"""Schedule-Free AdamW: averages the weights instead of decaying the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.decay_shape import DecayShape
from lm_trainer.optim.params import Arrays, Params

if TYPE_CHECKING:
    import jax
    import optax
    from optax.contrib import ScheduleFreeState


class ScheduleFreeConfig(OptimizerConfig):
    """Schedule-Free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1).

    It keeps three sequences of weights: z, the weights of the base optimizer; x, their weighted average, which is
    evaluated and exported; and y = (1 - beta1) z + beta1 x between them, which is trained and at which gradients are
    computed.
    """

    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    weights_in_state: ClassVar[bool] = True

    type: Literal["schedule_free"] = "schedule_free"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate. The paper recommends 1 to 10 times the learning rate of AdamW, 0.0025 for nanoGPT."""
    lr_schedule: DecayShape = "constant"
    """Shape of the decay; no decay is needed."""
    beta1: float = Field(default=0.9, gt=0, lt=1)
    """Fraction of x in y, which is the position of y between z and x."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_lr_power: NonNegativeFloat = 2.0
    """The weight of each step in the average is this power of the largest learning rate so far."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update without momentum; the distance between y and z takes the role of momentum."""
        import optax

        del params
        return optax.scale_by_rms(decay=self.beta2, eps=self.epsilon, eps_in_sqrt=False, bias_correction=True)

    def rule(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """Returns the update of y that results from a step of the base optimizer on z."""
        import jax
        import jax.numpy as jnp
        import optax
        from optax.contrib import ScheduleFreeState

        base = super().rule(params)

        def init(weights: Arrays) -> ScheduleFreeState:
            # float32 for any dtype of the weights: in bfloat16 the sum of the step weights would soon stop growing.
            return ScheduleFreeState(
                b1=jnp.float32(self.beta1),
                weight_sum=jnp.float32(0.0),
                step_count=jnp.int32(1),
                max_lr=jnp.float32(0.0),
                base_optimizer_state=base.init(weights),
                # A copy, because state and weights are donated to one program, which must not receive a buffer twice.
                z=jax.tree.map(jnp.copy, weights),
            )

        def update(
            updates: Arrays,
            state: PyTree,
            weights: PyTree = None,
            /,
            *,
            learning_rate: jax.Array,
            **extra_args: PyTree,
        ) -> tuple[PyTree, PyTree]:
            # Created in each step, because optax takes the learning rate here, and for our step it is an argument. x is
            # not part of the state: optax computes it from y and z, which saves the memory of a copy of the weights.
            free = optax.contrib.schedule_free(base, learning_rate, b1=self.beta1, weight_lr_power=self.weight_lr_power)
            return free.update(updates, state, weights, learning_rate=learning_rate, **extra_args)

        return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

    def eval_params(self, params: PyTree, opt_state: optax.OptState) -> PyTree:
        """Returns the average x = (y - (1 - beta1) z) / beta1."""
        import jax
        import optax

        z = optax.tree_utils.tree_get(opt_state, "z")
        return jax.tree.map(lambda y, z: ((y - (1 - self.beta1) * z) / self.beta1).astype(y.dtype), params, z)
