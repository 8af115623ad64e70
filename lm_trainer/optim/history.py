"""The last values of a quantity, and how large the next may be. It is part of an optimizer's state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.parallel.ordered_sum import tree_sum

_LEAST_DEVIATION = 1e-6


class History(NamedTuple):
    """A ring of finite values; every device holds all of it."""

    ring: jax.Array
    """float32 [window]; slots that were never written are 0."""
    count: jax.Array
    """int32, how many values were ever pushed."""

    @classmethod
    def empty(cls, window: int) -> History:
        """Room for `window` values."""
        return cls(jnp.zeros((window,), jnp.float32), jnp.zeros((), jnp.int32))

    def push(self, value: jax.Array, condition: jax.Array) -> History:
        """Takes a value in place of the oldest if `condition` holds."""
        slot = self.count % self.ring.size
        pushed = self.ring.at[slot].set(value.astype(jnp.float32))
        return History(
            jnp.where(condition, pushed, self.ring), self.count + jnp.where(condition, 1, 0).astype(jnp.int32)
        )

    def limit(self, sigma_factor: float) -> jax.Array:
        """The mean plus `sigma_factor` times the standard deviation (of the population, at least 1e-6) of what is held.

        Infinite while fewer than half of the slots, or fewer than two, are in use.
        """
        window = self.ring.size
        used = jnp.minimum(self.count, window)
        amount = jnp.maximum(used, 1).astype(jnp.float32)
        held = jnp.arange(window) < used
        mean = tree_sum(self.ring) / amount
        deviations = jnp.where(held, self.ring - mean, 0.0)
        deviation = jnp.sqrt(tree_sum(jnp.square(deviations)) / amount)
        limit = mean + sigma_factor * jnp.maximum(deviation, _LEAST_DEVIATION)
        return jnp.where(used >= max(2, window // 2), limit, jnp.inf)
