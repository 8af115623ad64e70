"""8-bit block floating point. Each element is a small float, and each block of elements shares an exponent byte.

The format follows the OCP Microscaling specification 1.0 (MXFP8: E4M3 elements sharing a power of two), with blocks
of any size along an axis, and a second element format for unsigned numbers:

    signed      1 sign, 4 exponent, 3 mantissa bits     448 to 2^-9 (float8_e4m3fn)
    unsigned    5 exponent, 3 mantissa bits             61440 to 2^-17 (a float16 without its sign and last 7 bits)

Everything is computed with integers, and a product with a power of two is exact, so no compiler can round differently.
The maximum of a block does not depend on the order of the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MANTISSA, _BIAS, _INFINITE = 23, 127, 0xFF
"""Number of mantissa bits of a float32, the bias of its exponent, and the exponent of infinities and NaNs."""
_DIGITS = 3
"""Number of mantissa bits of a code."""
_RANDOM_BITS = 16
"""Number of random bits for stochastic rounding."""


class BlockFloats(NamedTuple):
    """An array in 8-bit block floating point."""

    codes: jax.Array
    """uint8, in the shape of the array."""
    block_exponents: jax.Array
    """uint8, in the shape of the array with the number of blocks as its block axis: the biased float32 exponent of the
    scale, chosen so that the block's maximum, rounded up, does not exceed the largest code."""


@dataclass(frozen=True)
class Blocks:
    """The division of an array into blocks along one axis."""

    axis: int
    """The axis that is divided into blocks."""
    size: int
    """Number of elements per block. The last block may be shorter."""

    def num_blocks(self, length: int) -> int:
        """Returns the number of blocks along an axis of this length."""
        return -(-length // self.size)

    def max_per_block(self, x: jax.Array) -> jax.Array:
        """Returns the maximum of each block, in the shape of the exponents.

        The elements must be non-negative integers.
        """
        axis, length = self.axis, x.shape[self.axis]
        count = self.num_blocks(length)
        if count * self.size != length:
            x = jnp.pad(x, [(0, count * self.size - length if i == axis else 0) for i in range(x.ndim)])
        return x.reshape(*x.shape[:axis], count, self.size, *x.shape[axis + 1 :]).max(axis + 1)

    def repeat_per_element(self, x: jax.Array, length: int) -> jax.Array:
        """Repeats the value of each block over its elements. `length` is the size of the axis in the result."""
        axis = self.axis
        shape = (*x.shape[: axis + 1], self.size, *x.shape[axis + 1 :])
        repeated = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
        return repeated.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])[(slice(None),) * axis + (slice(length),)]


@dataclass(frozen=True)
class Format:
    """An 8-bit element format."""

    signed: bool
    lowest: int
    """Exponent of the smallest normal code. Subnormal codes below it have the same spacing."""
    highest: int
    """Exponent of the largest code."""
    top: int
    """Mantissa of the largest code."""

    @property
    def largest(self) -> int:
        """The largest code."""
        return ((self.highest - self.lowest + 1) << _DIGITS) + self.top

    @property
    def nan(self) -> int:
        """The code for NaN and infinities."""
        return 0x7F if self.signed else 0xFF

    @property
    def least_exponent(self) -> int:
        """The smallest block exponent, with which the smallest code represents the smallest normal float32."""
        return self.highest - self.lowest + _DIGITS + 1


SIGNED = Format(signed=True, lowest=-6, highest=8, top=0b110)
UNSIGNED = Format(signed=False, lowest=-14, highest=15, top=0b111)


def block_exponents(x: jax.Array, form: Format, blocks: Blocks) -> jax.Array:
    """Returns the block exponents of a float32 array. See `BlockFloats.block_exponents`."""
    magnitude = jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF
    largest = blocks.max_per_block(jnp.where(magnitude >> _MANTISSA != _INFINITE, magnitude, 0))
    # Carries into the exponent if the mantissa of the maximum exceeds the mantissa of the largest code.
    carry = (1 << _MANTISSA) - 1 - (form.top << (_MANTISSA - _DIGITS))
    return jnp.maximum((largest + carry) >> _MANTISSA, form.least_exponent).astype(jnp.uint8)


def encode(x: jax.Array, exponents: jax.Array, form: Format, blocks: Blocks, random_bits: jax.Array) -> BlockFloats:
    """Rounds each number to one of its two neighbouring codes.

    A nonzero unsigned number never becomes 0. It becomes at least the smallest code, because optimizers divide by the
    root of the second moment.

    Args:
        x: float32. An unsigned format drops the sign. NaN and infinities become NaN.
        exponents: `block_exponents` of `x`.
        form: format of the codes.
        blocks: division of `x` into blocks.
        random_bits: uint16 in the shape of `x`; 0 rounds towards 0. Uniform random values make the expected value of
            the code exact up to 2^-16 of the distance between the two neighbours (stochastic rounding; Gupta et al.
            2015, arXiv 1502.02551, section 3.1).
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    exponent = (magnitude >> _MANTISSA).astype(jnp.int32)
    finite = exponent != _INFINITE
    # The exponent field of the element (clamped to the subnormal range), and the mantissa followed by the random bits.
    element = (
        exponent
        - blocks.repeat_per_element(exponents, x.shape[blocks.axis]).astype(jnp.int32)
        + form.highest
        - form.lowest
    )
    mantissa = (magnitude & ((1 << _MANTISSA) - 1)) | jnp.where(exponent > 0, 1 << _MANTISSA, 0).astype(jnp.uint32)
    # A shift by the width of the integer or more is undefined.
    shift = jnp.minimum(_MANTISSA - _DIGITS - _RANDOM_BITS + jnp.maximum(-element, 0), 31).astype(jnp.uint32)
    rounded = ((mantissa >> shift) + random_bits) >> _RANDOM_BITS
    # `exponents` may come from a program that rounds differently, so they may be one unit in the last place too small.
    code = jnp.minimum((jnp.maximum(element, 0).astype(jnp.uint32) << _DIGITS) + rounded, form.largest)
    if not form.signed:
        code = jnp.maximum(code, (magnitude > 0).astype(jnp.uint32))
    code = jnp.where(finite, code, form.nan)
    if form.signed:
        code |= sign << 7
    return BlockFloats(code.astype(jnp.uint8), exponents.astype(jnp.uint8))


def decode(x: BlockFloats, form: Format, blocks: Blocks) -> jax.Array:
    """Returns exactly the float32 numbers that the codes represent."""
    code = x.codes.astype(jnp.int32)
    magnitude = code & 0x7F if form.signed else code
    exponent = magnitude >> _DIGITS
    mantissa = (magnitude & ((1 << _DIGITS) - 1)) | jnp.where(exponent > 0, 1 << _DIGITS, 0)
    shared = blocks.repeat_per_element(x.block_exponents, code.shape[blocks.axis]).astype(jnp.int32)
    power = jnp.maximum(exponent - 1, 0) + form.lowest - _DIGITS + shared - form.highest
    number = mantissa.astype(jnp.float32) * jax.lax.bitcast_convert_type(power << _MANTISSA, jnp.float32)
    number = jnp.where(magnitude == form.nan, jnp.float32(jnp.nan), number)
    return jnp.where(code >> 7 == 1, -number, number) if form.signed else number
