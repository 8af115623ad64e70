"""Cautious AdamW: masks the elements of Adam's update whose sign differs from the gradient's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Arrays, Params

if TYPE_CHECKING:
    import jax
    import optax

_LEAST_SHARE = 1e-3
"""Minimum fraction of agreeing elements by which the update is divided."""


class CautiousConfig(OptimizerConfig):
    """Cautious AdamW (Liang et al. 2024, arXiv 2411.16085, algorithm 1).

    The update is divided by the fraction of elements that agree, as in the authors' later code. The algorithm in the
    paper adds 1 to the number of agreeing elements.
    """

    # The fraction is computed from an integer count, which is exact in any order of summation.
    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("nu",)

    type: Literal["cautious"] = "cautious"
    beta1: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update where it has the gradient's sign, divided by the fraction of such elements."""
        import optax

        return _mask_disagreeing_updates(optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon), params)


def _mask_disagreeing_updates(inner: optax.GradientTransformation, weights: Params) -> optax.GradientTransformation:
    """Masks the updates of `inner`. Each weight, and each layer of a stack, is scaled by a separate fraction."""
    import jax.numpy as jnp
    import optax

    def mask_update(name: str, u: jax.Array, g: jax.Array) -> jax.Array:
        axes = tuple(range(weights[name].lead, u.ndim))
        agree = u * g > 0
        # Counted with integers, because the bits of a floating-point sum over a shard would depend on the mesh.
        count = jnp.sum(agree, axis=axes, keepdims=True, dtype=jnp.int32)
        share = count.astype(jnp.float32) / (u.size // count.size)
        return jnp.where(agree, u / jnp.maximum(share, _LEAST_SHARE).astype(u.dtype), jnp.zeros_like(u))

    def update(updates: Arrays, state: optax.OptState, params: Arrays | None = None) -> tuple[Arrays, optax.OptState]:
        inner_updates: PyTree
        inner_updates, state = inner.update(updates, state, params)
        return {name: mask_update(name, u, updates[name]) for name, u in inner_updates.items()}, state

    return optax.GradientTransformation(inner.init, update)  # pyright: ignore[reportArgumentType]
