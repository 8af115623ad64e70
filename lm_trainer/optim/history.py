"""Ring buffer of the last values of a quantity, and a limit for the next value; part of an optimizer's state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.parallel.tree_sum import tree_sum

_LEAST_DEVIATION = 1e-6
"""Minimum deviation: the deviation of equal values is 0, so that a change of the last digit would be rejected."""


class History(NamedTuple):
    """A ring buffer of finite values, replicated on every device."""

    ring: jax.Array
    """float32 [window]; unused slots are 0."""
    count: jax.Array
    """int32 [], total number of values pushed."""

    @classmethod
    def empty(cls, window: int) -> History:
        """Creates an empty buffer for `window` values."""
        return cls(jnp.zeros((window,), jnp.float32), jnp.zeros((), jnp.int32))

    def push(self, value: jax.Array, condition: jax.Array) -> History:
        """Replaces the oldest value by `value` if `condition` holds."""
        slot = self.count % self.ring.size
        pushed = self.ring.at[slot].set(value.astype(jnp.float32))
        return History(
            jnp.where(condition, pushed, self.ring), self.count + jnp.where(condition, 1, 0).astype(jnp.int32)
        )

    def limit(self, sigma_factor: float) -> jax.Array:
        """The mean plus `sigma_factor` times the standard deviation of the stored values, float32 [].

        This is the standard deviation of the population, at least 1e-6. The limit is infinite while fewer than half of
        the slots, or fewer than two, are in use.
        """
        window = self.ring.size
        used = jnp.minimum(self.count, window)
        amount = jnp.maximum(used, 1).astype(jnp.float32)
        held = jnp.arange(window) < used
        # Unused slots are 0, and so do not change the sum; they must be masked in the deviations.
        mean = tree_sum(self.ring) / amount
        deviations = jnp.where(held, self.ring - mean, 0.0)
        deviation = jnp.sqrt(tree_sum(jnp.square(deviations)) / amount)
        limit = mean + sigma_factor * jnp.maximum(deviation, _LEAST_DEVIATION)
        return jnp.where(used >= max(2, window // 2), limit, jnp.inf)
