"""Checksums and hashes of arrays that do not depend on how they are sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.parallel.cpu_sync import wait_on_cpu

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SMALL = 2**16
"""Elements of an array of a CPU for which NumPy takes less time than JAX takes to make a program of its shape."""
# One for each of the two sums of `hashes`, so that a chance collision in one is none in the other.
_SALTS = (0x9E3779B9, 0x7F4A7C15)


def digests(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    """Computes a 32-bit checksum of each array: sum over i of bits(x_i) * (2 i + 1) * 0x9E3779B1, modulo 2^32.

    Any single flipped bit changes it, since every factor is odd, and so does any swap of two unequal elements whose
    difference is not a multiple of a large power of two. Integer sums are exact in every order, so the sharding
    changes nothing.

    Args:
        arrays: of any shape, with 1, 2 or 4 bytes an element.
    """
    return {name: sums[0] for name, sums in _compute(_checksum, arrays).items()}


def hashes(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
    """Computes a 64-bit hash of each array, as 16 hex digits: equal for equal bits, else equal by chance alone.

    The bits of each element are mixed with its index, and the results are added modulo 2^32, in two such sums with
    different salts. Unlike in `digests`, whose sum is linear, changes in several elements cannot cancel each other.
    Of several processes, all must call it.

    Args:
        arrays: of any shape, with 1, 2 or 4 bytes an element.
    """
    return {name: "".join(f"{part:08x}" for part in sums) for name, sums in _compute(_salted_sums, arrays).items()}


Sums = Callable[[Any, Any], list[Any]]
"""Sums over the bits of all elements and their indices, modulo 2^32, which are arrays of JAX or of NumPy."""


def _checksum(bits: Any, index: Any) -> list[Any]:
    return [(bits * (index * np.uint32(2) + np.uint32(1)) * np.uint32(0x9E3779B1)).sum(dtype=np.uint32)]


def _salted_sums(bits: Any, index: Any) -> list[Any]:
    return [_mix(bits ^ _mix(index + np.uint32(salt))).sum(dtype=np.uint32) for salt in _SALTS]


def _mix(x: Any) -> Any:
    """The finalizer of MurmurHash3 for 32 bits (Appleby 2011), a permutation that mixes every bit into every other."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _compute(sums: Sums, arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, list[int]]:
    # All are started before the first is waited for, so that an accelerator computes without a pause.
    started = {
        name: sums(*_bits_and_index_on_host(x)) if _is_small(x) else wait_on_cpu(_on_devices(sums, x))
        for name, x in arrays.items()
    }
    return {name: [_number(value) for value in values] for name, values in started.items()}


def _is_small(x: jax.Array | np.ndarray) -> bool:
    """True of an array that costs less where it is, in the memory of this process."""
    if isinstance(x, np.ndarray):
        return x.size <= _SMALL
    return x.size <= _SMALL and x.is_fully_addressable and next(iter(x.devices())).platform == "cpu"


# One program for each shape compiles faster than one for all arrays, of which most have the shape of others.
@functools.partial(jax.jit, static_argnums=0)
def _on_devices(sums: Sums, x: Any) -> list[jax.Array]:
    return sums(*_bits_and_index(x))


def _number(x: Any) -> int:
    """The value of a replicated scalar; waits until it is computed."""
    # Every process has a copy of its own, while `int(x)` refuses an array that spans several processes.
    return int(np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x))


def _bits_and_index_on_host(x: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_bits_and_index`, of the flattened array, in NumPy."""
    elements = np.asarray(x).reshape(-1)
    bits = elements.view(_BITS[elements.dtype.itemsize]).astype(np.uint32)
    return bits, np.arange(elements.size, dtype=np.uint32)


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
