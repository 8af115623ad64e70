"""Explicit broadcasting, since the tests refuse implicit rank promotion."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def with_rank_of(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Prepends dimensions of size 1 to `weight`, which has the last dimensions of `x`, up to the rank of `x`."""
    return jnp.expand_dims(weight, tuple(range(x.ndim - weight.ndim)))
