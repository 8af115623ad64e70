"""Checksums and hashes of arrays, independent of their sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.core.bits import UNSIGNED, flat_index, mix_bits, read_bits
from lm_trainer.parallel.cpu_sync import wait_on_cpu

_SMALL = 2**16
"""Maximum number of elements for which NumPy on a CPU is faster than compiling a JAX program for the shape."""
# Each sum in `compute_hashes` has its own salt, so that a collision in one sum does not imply a collision in the other.
_SALTS = (0x9E3779B9, 0x7F4A7C15)


def compute_checksums(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    """Computes a 32-bit checksum of each array: sum over i of bits(x_i) * (2 i + 1) * 0x9E3779B1, modulo 2^32.

    Every factor is odd, so any single flipped bit changes the checksum. Swapping two unequal elements also changes it,
    unless their difference is a multiple of a large power of two. Integer sums are exact in any order, so the result
    does not depend on the sharding.

    Args:
        arrays: arrays of any shape, with 1, 2 or 4 bytes per element.
    """
    return {name: sums[0] for name, sums in _compute_sums(_checksum, arrays).items()}


def compute_hashes(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
    """Computes a 64-bit hash of the bits of each array, as 16 hexadecimal digits.

    The bits of each element are mixed with its index and summed modulo 2^32, in two sums with different salts. Arrays
    with different bits have the same hash only by chance: unlike in the linear sum of `compute_checksums`, changes in
    several elements do not cancel systematically. All processes must call this function.

    Args:
        arrays: arrays of any shape, with 1, 2 or 4 bytes per element.
    """
    return {name: "".join(f"{part:08x}" for part in sums) for name, sums in _compute_sums(_salted_sums, arrays).items()}


def compile_checksums(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Compiles the programs of `compute_checksums` for arrays with these shapes and shardings, in any thread."""
    for x in _distinct_large(arrays):
        _on_devices.lower(_checksum, x).compile()


def compile_hashes(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Compiles the programs of `compute_hashes` and `find_non_finite` for such arrays, in any thread."""
    for x in _distinct_large(arrays):
        _on_devices.lower(_salted_sums, x).compile()
        if jnp.issubdtype(x.dtype, jnp.inexact):
            _all_finite.lower(x).compile()


def _distinct_large(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> Iterable[jax.ShapeDtypeStruct]:
    return {(x.shape, x.dtype, x.sharding): x for x in arrays.values() if not _is_small(x)}.values()


SumFunction = Callable[[Any, Any], list[Any]]
"""Function that takes the bits and indices of all elements (JAX or NumPy arrays) and returns sums modulo 2^32."""


def _checksum(bits: Any, index: Any) -> list[Any]:
    return [(bits * (index * np.uint32(2) + np.uint32(1)) * np.uint32(0x9E3779B1)).sum(dtype=np.uint32)]


def _salted_sums(bits: Any, index: Any) -> list[Any]:
    return [mix_bits(bits ^ mix_bits(index + np.uint32(salt))).sum(dtype=np.uint32) for salt in _SALTS]


def _compute_sums(sums: SumFunction, arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, list[int]]:
    # Dispatches the programs of all arrays before waiting for the first result, to keep an accelerator busy.
    started = {
        name: sums(*_bits_and_index_on_host(x)) if _is_small(x) else wait_on_cpu(_on_devices(sums, x))
        for name, x in arrays.items()
    }
    return {name: [_read_scalar(value) for value in values] for name, values in started.items()}


def _is_small(x: jax.Array | jax.ShapeDtypeStruct | np.ndarray) -> bool:
    """Returns True if it is cheaper to process the array with NumPy, in the memory of this process."""
    if isinstance(x, np.ndarray):
        return x.size <= _SMALL
    sharding = x.sharding
    assert sharding is not None
    return x.size <= _SMALL and sharding.is_fully_addressable and next(iter(sharding.device_set)).platform == "cpu"


# Compiling one program per shape is faster than compiling one for all arrays, because many arrays have the same shape.
@functools.partial(jax.jit, static_argnums=0)
def _on_devices(sums: SumFunction, x: Any) -> list[jax.Array]:
    return sums(*_bits_and_index(x))


def _read_scalar(x: Any) -> int:
    """Returns the value of a replicated scalar. Blocks until it has been computed."""
    # Reads the copy of this process, because `int(x)` fails for an array that spans several processes.
    return int(np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x))


def _bits_and_index_on_host(x: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Like `_bits_and_index`, but for the flattened array and with NumPy."""
    elements = np.asarray(x).reshape(-1)
    bits = elements.view(UNSIGNED[elements.dtype.itemsize]).astype(np.uint32)
    return bits, np.arange(elements.size, dtype=np.uint32)


def _bits_and_index(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of each element as uint32 and its flat index modulo 2^32, both in the shape of `x`."""
    return read_bits(x), flat_index(x)


def find_non_finite(arrays: Mapping[str, jax.Array]) -> list[str]:
    """Returns the names of the arrays that contain a NaN or an infinity. All processes must call this function."""
    finite = {
        name: np.isfinite(np.asarray(x)).all() if _is_small(x) else wait_on_cpu(_all_finite(x))
        for name, x in arrays.items()
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }
    return [name for name, value in finite.items() if not _read_scalar(value)]


# One program per shape, as for `_on_devices`.
@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()
