"""What every optimizer shares: learning-rate fields, the weight-decay mask, clipping by a given norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from lm_trainer.core.config import Config
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

    def build(self, decays: Any) -> optax.GradientTransformationExtraArgs:
        """The update rule.

        Its `update` takes the keyword arguments `learning_rate` and `grad_norm` (float32 scalars): both are computed
        once, outside, so that no device computes them differently.

        Args:
            decays: a tree of bools with the structure of the parameters: which of them decay.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to build its update rule")


def decays_by_default(name: str, axes: Sequence[str | None]) -> bool:
    """Whether a parameter decays: matrices do; biases, norms, embedding and position tables do not.

    Args:
        name: dotted name of the parameter.
        axes: logical axes of its dimensions.
    """
    dims = [a for a in axes if a != "layers"]
    if name.rsplit(".", 1)[-1] == "bias" or len(dims) < 2:
        return False
    return not ("position" in dims or ("vocab" in dims and "head" not in name))


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
