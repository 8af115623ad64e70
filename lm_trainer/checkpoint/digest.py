"""Checksums and hashes of arrays that do not depend on how they are sharded."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.parallel.cpu_sync import wait_on_cpu

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# One for each of the two sums of `hashes`, so that a chance collision in one is none in the other.
_SALTS = (0x9E3779B9, 0x7F4A7C15)


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Computes a 32-bit checksum of each array: sum over i of bits(x_i) * (2 i + 1) * 0x9E3779B1, modulo 2^32.

    Any single flipped bit changes it, since every factor is odd, and so does any swap of two unequal elements whose
    difference is not a multiple of a large power of two. Integer sums are exact in every order, so the sharding
    changes nothing.

    Args:
        arrays: of any shape, with 1, 2 or 4 bytes an element.
    """
    # All are started before the first is waited for, so that an accelerator computes without a pause.
    values = {name: wait_on_cpu(_digest(x)) for name, x in arrays.items()}
    return {name: _number(value) for name, value in values.items()}


# One program for each shape compiles faster than one for all arrays, of which most have the shape of others.
@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    bits, index = _bits_and_index(x)
    return jnp.sum(bits * (index * 2 + 1) * jnp.uint32(0x9E3779B1), dtype=jnp.uint32)


def hashes(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Computes a 64-bit hash of each array, as 16 hex digits: equal for equal bits, else equal by chance alone.

    The bits of each element are mixed with its index, and the results are added modulo 2^32, in two such sums with
    different salts. Unlike in `digests`, whose sum is linear, changes in several elements cannot cancel each other.
    Of several processes, all must call it.

    Args:
        arrays: of any shape, with 1, 2 or 4 bytes an element.
    """
    values = {name: wait_on_cpu(_hash(x)) for name, x in arrays.items()}
    return {name: "".join(f"{_number(part):08x}" for part in parts) for name, parts in values.items()}


@jax.jit
def _hash(x: jax.Array) -> list[jax.Array]:
    bits, index = _bits_and_index(x)
    return [jnp.sum(_mix(bits ^ _mix(index + jnp.uint32(salt))), dtype=jnp.uint32) for salt in _SALTS]


def _number(x: jax.Array) -> int:
    """The value of a replicated scalar; waits until it is computed."""
    # Every process has a copy of its own, while `int(x)` refuses an array that spans several processes.
    return int(np.asarray(x.addressable_data(0)))


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 for 32 bits (Appleby 2011), a permutation that mixes every bit into every other."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bits_and_index(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every element as an unsigned number, and its index in the flattened array, modulo 2^32; both shaped like `x`."""
    # A boolean has no bits that could be cast.
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).astype(jnp.uint32)
    # Built axis by axis, so that each device can compute the indices of its own shard alone.
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return bits, index


def not_finite(arrays: Mapping[str, jax.Array]) -> list[str]:
    """The names of the arrays that hold a NaN or an infinity. Of several processes, all must call it."""
    values = _all_finite({name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)})
    return [name for name, value in values.items() if not np.asarray(value.addressable_data(0))]


@jax.jit
def _all_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(x)) for name, x in arrays.items()}
