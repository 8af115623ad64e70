"""Cautious AdamW: only those numbers of Adam's update that agree in sign with the present gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import jax
    import optax

_LEAST_SHARE = 1e-3
"""Least share of numbers that agree: where fewer do, they are scaled up by its inverse."""


class CautiousConfig(OptimizerConfig):
    """Cautious AdamW (Liang et al. 2024, arXiv 2411.16085, algorithm 1). The update is divided by the share of numbers
    that agree, as in the later code of its authors, where the algorithm adds 1 to the count of those that agree.
    """

    # The share of numbers that agree is computed from a count of integers, which is exact in any order.
    elementwise_transform: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)

    type: Literal["cautious"] = "cautious"
    beta1: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update where it agrees with the gradient, scaled up by all numbers over those that agree."""
        import optax

        return _cautious(optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon), params)


def _cautious(inner: optax.GradientTransformation, known: Params) -> optax.GradientTransformation:
    """Masks the updates of `inner`; each weight, and each layer of a stack, is scaled by its own share."""
    import jax.numpy as jnp
    import optax

    def masked(name: str, u: jax.Array, g: jax.Array) -> jax.Array:
        axes = tuple(range(known[name].lead, u.ndim))
        agree = u * g > 0
        # Integers: a float sum over a shard would have other bits on another mesh.
        count = jnp.sum(agree, axis=axes, keepdims=True, dtype=jnp.int32)
        share = count.astype(jnp.float32) / (u.size // count.size)
        return jnp.where(agree, u / jnp.maximum(share, _LEAST_SHARE).astype(u.dtype), jnp.zeros_like(u))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        inner_updates: Any
        inner_updates, state = inner.update(updates, state, params)
        return {name: masked(name, u, updates[name]) for name, u in inner_updates.items()}, state

    return optax.GradientTransformation(inner.init, update)
