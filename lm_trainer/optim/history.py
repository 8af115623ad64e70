"""Ring of the last values of a quantity, and a limit for the next; part of an optimizer's state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.parallel.tree_sum import tree_sum

_LEAST_DEVIATION = 1e-6
"""The least deviation: that of equal values is 0, and a change of the last digit would be refused."""


class History(NamedTuple):
    """A ring of finite values, whole on every device."""

    ring: jax.Array
    """float32 [window]; slots that were never written are 0."""
    count: jax.Array
    """int32 [], the number of values that were ever pushed."""

    @classmethod
    def empty(cls, window: int) -> History:
        """Returns a ring without values, with room for `window` of them."""
        return cls(jnp.zeros((window,), jnp.float32), jnp.zeros((), jnp.int32))

    def push(self, value: jax.Array, condition: jax.Array) -> History:
        """Takes a value in place of the oldest if `condition` holds."""
        slot = self.count % self.ring.size
        pushed = self.ring.at[slot].set(value.astype(jnp.float32))
        return History(
            jnp.where(condition, pushed, self.ring), self.count + jnp.where(condition, 1, 0).astype(jnp.int32)
        )

    def limit(self, sigma_factor: float) -> jax.Array:
        """Returns, float32 [], the mean plus `sigma_factor` times the standard deviation of the values that are held.

        The deviation is that of the population, and at least 1e-6. The limit is infinite while fewer than half of the
        slots, or fewer than two, are in use.
        """
        window = self.ring.size
        used = jnp.minimum(self.count, window)
        amount = jnp.maximum(used, 1).astype(jnp.float32)
        held = jnp.arange(window) < used
        # Slots that are not in use are 0 and add nothing to the sum; from the deviations they have to be taken out.
        mean = tree_sum(self.ring) / amount
        deviations = jnp.where(held, self.ring - mean, 0.0)
        deviation = jnp.sqrt(tree_sum(jnp.square(deviations)) / amount)
        limit = mean + sigma_factor * jnp.maximum(deviation, _LEAST_DEVIATION)
        return jnp.where(used >= max(2, window // 2), limit, jnp.inf)
