"""Numbers in 8 bits that share an exponent in blocks: each a small float, with one byte more for every block.

The format is that of the OCP Microscaling specification 1.0 (MXFP8: E4M3 elements that share a power of two), with
blocks of any size along an axis, and another element for numbers that have no sign:

    signed      1 sign, 4 exponent, 3 mantissa bits     448 to 2^-9 (float8_e4m3fn)
    unsigned    5 exponent, 3 mantissa bits             61440 to 2^-17 (a float16 without its sign and last 7 bits)

Everything is computed with integers, and a product with a power of two is exact, so that no compiler can round anything
in another way. The largest number of a block is the same in whatever order it is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MANTISSA, _BIAS, _INFINITE = 23, 127, 0xFF
"""Bits of the mantissa of a float32, the bias of its exponent, and the exponent of infinities and NaNs."""
_KEPT = 3
"""Bits of mantissa that are kept."""
_CHANCE = 16
"""Random bits that decide about rounding up."""


class BlockFloats(NamedTuple):
    """An array in 8 bits."""

    codes: jax.Array
    """uint8, in the shape of the array."""
    block_exponents: jax.Array
    """uint8, that shape with the number of blocks in place of the axis along which they lie: the biased exponent of a
    float32, by which the largest number of the block, as it is rounded up, lies below the largest code."""


@dataclass(frozen=True)
class Blocks:
    """The place of the blocks in an array."""

    axis: int
    """The axis along which they lie."""
    size: int
    """Numbers in each of them but the last, which may be shorter."""

    def count(self, length: int) -> int:
        """The blocks of an axis of this length."""
        return -(-length // self.size)

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest number of each block, in the shape of the exponents; of integers that are not negative."""
        axis, length = self.axis, x.shape[self.axis]
        count = self.count(length)
        if count * self.size != length:
            x = jnp.pad(x, [(0, count * self.size - length if i == axis else 0) for i in range(x.ndim)])
        return x.reshape(*x.shape[:axis], count, self.size, *x.shape[axis + 1 :]).max(axis + 1)

    def spread(self, x: jax.Array, length: int) -> jax.Array:
        """The array of this length along the axis that has the number of its block at each place."""
        axis = self.axis
        shape = (*x.shape[: axis + 1], self.size, *x.shape[axis + 1 :])
        whole = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
        return whole.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])[(slice(None),) * axis + (slice(length),)]


@dataclass(frozen=True)
class Format:
    """The numbers that a code stands for."""

    signed: bool
    lowest: int
    """Exponent of the least code with all its digits; below it codes are as far apart as at it."""
    highest: int
    """Exponent of the largest code."""
    top: int
    """Mantissa of the largest code."""

    @property
    def largest(self) -> int:
        """The largest code."""
        return ((self.highest - self.lowest + 1) << _KEPT) + self.top

    @property
    def nan(self) -> int:
        """The code of what is not finite."""
        return 0x7F if self.signed else 0xFF

    @property
    def least_exponent(self) -> int:
        """The least exponent of a block: with it the least code stands for the least normal float32."""
        return self.highest - self.lowest + _KEPT + 1


SIGNED = Format(signed=True, lowest=-6, highest=8, top=0b110)
UNSIGNED = Format(signed=False, lowest=-14, highest=15, top=0b111)


def shared_exponents(x: jax.Array, form: Format, blocks: Blocks) -> jax.Array:
    """The exponents of the blocks of a float32 array, as `BlockFloats.block_exponents`."""
    magnitude = jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF
    largest = blocks.largest(jnp.where(magnitude >> _MANTISSA != _INFINITE, magnitude, 0))
    # Where the mantissa of the largest number is above that of the largest code, the exponent takes the carry.
    carry = (1 << _MANTISSA) - 1 - (form.top << (_MANTISSA - _KEPT))
    return jnp.maximum((largest + carry) >> _MANTISSA, form.least_exponent).astype(jnp.uint8)


def encode(x: jax.Array, shared: jax.Array, form: Format, blocks: Blocks, chance: jax.Array) -> BlockFloats:
    """Rounds each number to one of the two codes around it.

    An unsigned number that is not 0 becomes no 0, but the least code: the root of a second moment is divided by.

    Args:
        x: float32; negative numbers of an unsigned format are taken as positive, and what is not finite becomes NaN.
        shared: `shared_exponents` of `x`.
        form: of the codes.
        blocks: in `x`.
        chance: uint16 in the shape of `x`; 0 rounds towards 0. Uniform, it makes the mean of the code's number exact up
            to 2^-16 of the distance of the two (stochastic rounding; Gupta et al. 2015, arXiv 1502.02551, section 3.1).
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    exponent = (magnitude >> _MANTISSA).astype(jnp.int32)
    finite = exponent != _INFINITE
    # In numbers of the code: its exponent, not below the lowest, and its mantissa with the bits of chance behind it.
    own = exponent - blocks.spread(shared, x.shape[blocks.axis]).astype(jnp.int32) + form.highest - form.lowest
    mantissa = (magnitude & ((1 << _MANTISSA) - 1)) | jnp.where(exponent > 0, 1 << _MANTISSA, 0).astype(jnp.uint32)
    # A shift by as many bits as there are, or more, is undefined.
    away = jnp.minimum(_MANTISSA - _KEPT - _CHANCE + jnp.maximum(-own, 0), 31).astype(jnp.uint32)
    rounded = ((mantissa >> away) + chance) >> _CHANCE
    # `shared` may have been computed by another program's rounding, and be too small by a last digit.
    code = jnp.minimum((jnp.maximum(own, 0).astype(jnp.uint32) << _KEPT) + rounded, form.largest)
    if not form.signed:
        code = jnp.maximum(code, (magnitude > 0).astype(jnp.uint32))
    code = jnp.where(finite, code, form.nan)
    if form.signed:
        code |= sign << 7
    return BlockFloats(code.astype(jnp.uint8), shared.astype(jnp.uint8))


def decode(x: BlockFloats, form: Format, blocks: Blocks) -> jax.Array:
    """The float32 numbers that codes stand for, exactly."""
    code = x.codes.astype(jnp.int32)
    magnitude = code & 0x7F if form.signed else code
    exponent = magnitude >> _KEPT
    mantissa = (magnitude & ((1 << _KEPT) - 1)) | jnp.where(exponent > 0, 1 << _KEPT, 0)
    shared = blocks.spread(x.block_exponents, code.shape[blocks.axis]).astype(jnp.int32)
    power = jnp.maximum(exponent - 1, 0) + form.lowest - _KEPT + shared - form.highest
    number = mantissa.astype(jnp.float32) * jax.lax.bitcast_convert_type(power << _MANTISSA, jnp.float32)
    number = jnp.where(magnitude == form.nan, jnp.float32(jnp.nan), number)
    return jnp.where(code >> 7 == 1, -number, number) if form.signed else number
