"""What every optimizer shares: learning-rate fields, the weight-decay mask, clipping by a given norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from lm_trainer.core.config import Config
from lm_trainer.optim.params import Param, Params
from lm_trainer.optim.schedule import Schedule, ScheduleName, build_schedule, plan_phases

_LATER = "not available yet"


class OptimizerConfig(Config):
    """Fields that all optimizers have: the learning rate over time and the weight decay."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "cooldown": "deprecated; use `decay`",
        "haps": "deprecated; use `cycles`",
        "warmup_ratio": "renamed; use `warmup`",
        **dict.fromkeys(
            ("rewarmup", "cycles", "cycle_length", "weight_decay_modules", "default_weight_decay_mask"), _LATER
        ),
    }

    learning_rate: PositiveFloat = 6e-4
    """The peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate; biases, norms and embedding tables do not decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the end of the decay, as a part of the peak."""
    warmup: NonNegativeInt | NonNegativeFloat = 0.01
    """Linear warm-up from 0: a fraction of the run (a float up to 1.0) or a number of steps."""
    decay: NonNegativeInt | NonNegativeFloat | None = None
    """Length of the decay at the end, as a fraction or in steps; null: everything after the warm-up."""
    lr_schedule: ScheduleName = "cosine"
    """The shape of the decay."""

    def schedule(self, num_train_steps: int) -> Schedule:
        """The learning rate as a function of the step, from 0.

        Raises:
            ValueError: when the phases do not fit into the run.
        """
        phases = plan_phases(self.warmup, self.decay, num_train_steps)
        return build_schedule(self.lr_schedule, phases, peak=self.learning_rate, min_ratio=self.min_lr_ratio)

    @property
    def elementwise(self) -> bool:
        """Whether the update of a number depends on nothing but its own gradient and state and given scalars.

        Only then can every device update its part of the state alone. Otherwise each computes the whole update, in one
        program that is the same on every mesh, because a sum over a part that the mesh decides would change its bits.
        """
        return False

    def build(self, params: Params) -> optax.GradientTransformationExtraArgs:
        """The update rule for these parameters, on flat dicts of arrays by the same names.

        Its `update` takes keyword arguments, all of them float32 scalars that were computed once, outside, so that no
        device computes them differently: `learning_rate`, `grad_norm` (the global norm of the gradient) and `loss`. It
        must take and ignore others.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to build its update rule")

    def decay_mask(self, params: Params) -> dict[str, bool]:
        """Which parameters decay."""
        return {name: decays_by_default(param) for name, param in params.items()}


def decays_by_default(param: Param) -> bool:
    """Whether a parameter decays: matrices and heads do; biases, norms, embedding and position tables do not."""
    return param.role in ("matrix", "head")


def clip_by_given_norm(max_norm: float | None) -> optax.GradientTransformationExtraArgs:
    """Scales the gradient down to the global norm `max_norm`; the norm itself is the argument `grad_norm`."""
    if max_norm is None:
        return optax.with_extra_args_support(optax.identity())

    def update(
        updates: Any, state: Any, params: Any = None, /, *, grad_norm: jax.Array, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(grad_norm, 1e-12))
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by minus the argument `learning_rate`."""

    def update(
        updates: Any, state: Any, params: Any = None, /, *, learning_rate: jax.Array, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        return jax.tree.map(lambda u: u * -learning_rate.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
