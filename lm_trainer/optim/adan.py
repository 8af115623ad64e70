"""Adan: Adam with Nesterov momentum estimated from differences of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Arrays, Params

if TYPE_CHECKING:
    import jax
    import optax


class AdanConfig(OptimizerConfig):
    """Adan (Xie et al. 2022, arXiv 2208.06677, algorithm 1), but with the weight decay of AdamW.

    Each decay is 1 minus the corresponding beta of the paper, as in the paper's code. As in that code, the averages are
    corrected for their initial bias.
    """

    elementwise_transform: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    squares_in_state: ClassVar[tuple[str, ...] | None] = ("n",)

    type: Literal["adan"] = "adan"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate. The paper uses 5 to 10 times the learning rate of AdamW."""
    weight_decay: NonNegativeFloat = 0.02
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.92, ge=0, lt=1)
    """Decay of the average of differences of successive gradients."""
    beta3: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the average of squares."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the average of squares."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the update (m + beta2 v) / (sqrt(n) + epsilon).

        m is the average of the gradients g, v of their changes d, and n of the squares of g + beta2 d.
        """
        import jax.numpy as jnp
        import optax

        del params

        def init(like: Arrays) -> AdanState:
            m, v, n, g = (optax.tree.zeros_like(like) for _ in range(4))
            return AdanState(m, v, n, g, jnp.zeros((), jnp.int32))

        return optax.GradientTransformation(init, self._update)  # pyright: ignore[reportArgumentType]

    def _update(self, updates: Arrays, state: AdanState, params: Arrays | None = None) -> tuple[Arrays, AdanState]:
        import jax
        import jax.numpy as jnp
        import optax

        del params
        first = state.t == 0
        # In the first step, the previous gradient is assumed to equal the gradient.
        change = jax.tree.map(lambda g, previous: jnp.where(first, 0, g - previous), updates, state.g)
        ahead = jax.tree.map(lambda g, d: g + self.beta2 * d, updates, change)
        m = optax.tree.update_moment(updates, state.m, self.beta1, 1)
        v = optax.tree.update_moment(change, state.v, self.beta2, 1)
        n = optax.tree.update_moment_per_elem_norm(ahead, state.n, self.beta3, 2)
        t = state.t + 1
        averages = (m, self.beta1), (v, self.beta2), (n, self.beta3)
        unbiased = (optax.tree.bias_correction(x, beta, t) for x, beta in averages)
        steps = jax.tree.map(lambda m, v, n: (m + self.beta2 * v) / (jnp.sqrt(n) + self.epsilon), *unbiased)
        return steps, AdanState(m, v, n, updates, t)


class AdanState(NamedTuple):
    """State of Adan; all fields except `t` have the shapes of the parameters."""

    m: Arrays
    """Average of gradients."""
    v: Arrays
    """Average of differences of successive gradients."""
    n: Arrays
    """Average of squares."""
    g: Arrays
    """Gradient of the previous step."""
    t: jax.Array
    """int32 []; number of steps so far."""
