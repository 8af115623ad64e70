"""Broadcasting that is written down: the tests refuse arrays of different ranks in one operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def with_rank_of(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight` of the last dimensions of `x`, with dimensions of size 1 in front until it has as many as `x`."""
    return jnp.expand_dims(weight, tuple(range(x.ndim - weight.ndim)))
