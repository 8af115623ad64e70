"""Ring buffer of the most recent values of a quantity, with a limit for the next value. Part of optimizer states."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.parallel.tree_sum import tree_sum

_LEAST_DEVIATION = 1e-6
"""Minimum deviation. Equal values have a deviation of 0, so a change of the last digit would otherwise be rejected."""


class History(NamedTuple):
    """A ring buffer of finite values, replicated on every device."""

    ring: jax.Array
    """float32 [window]; unused slots are 0."""
    count: jax.Array
    """int32 []; total number of values pushed so far."""

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
        """Returns the mean plus `sigma_factor` times the standard deviation of the stored values, float32 [].

        The deviation is the population standard deviation, at least 1e-6. The limit is infinite while fewer than half
        of the slots, or fewer than two, are in use.
        """
        window = self.ring.size
        used = jnp.minimum(self.count, window)
        amount = jnp.maximum(used, 1).astype(jnp.float32)
        held = jnp.arange(window) < used
        # Unused slots are 0 and do not change the sum, but they must be masked in the deviations.
        mean = tree_sum(self.ring) / amount
        deviations = jnp.where(held, self.ring - mean, 0.0)
        deviation = jnp.sqrt(tree_sum(jnp.square(deviations)) / amount)
        limit = mean + sigma_factor * jnp.maximum(deviation, _LEAST_DEVIATION)
        return jnp.where(used >= max(2, window // 2), limit, jnp.inf)
