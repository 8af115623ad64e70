"""Bits of arrays, and a function that mixes them, from which hashes of arrays are summed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Unsigned type by size of an element in bytes."""


def mix_bits(x: Any) -> Any:
    """Applies the 32-bit finalizer of MurmurHash3 (Appleby 2011), a permutation that mixes all bits.

    Args:
        x: uint32 array of JAX or NumPy.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def read_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as uint32. Elements have 1, 2 or 4 bytes."""
    # Booleans cannot be bitcast.
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    return jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def flat_index(x: jax.Array, first_axis: int = 0) -> jax.Array:
    """Returns the flat index of each element over the axes from `first_axis` on, modulo 2^32, in the shape of `x`."""
    # The index is computed axis by axis, so that each device computes only the indices of its shard.
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(first_axis, x.ndim):
        index = index * jnp.uint32(x.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return index
