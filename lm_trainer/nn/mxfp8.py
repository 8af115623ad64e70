"""MXFP8 matrix products: blocks of 32 e4m3 numbers along the contracted dimension share a scale, which is a power of
two.

The format follows the OCP Microscaling specification 1.0 (section 5.2, block size 32, scales in e8m0). Scales are
rounded up, so the largest number of a block does not saturate, and gradients are in e4m3 too (Mishra et al. 2025, arXiv
2506.08027, sections 3 and 4). Each product has blocks along its own contracted dimension, quantized from operands in
full precision: x and w along the inputs, the gradient and w along the outputs, x and the gradient along the rows.

Shape letters: M rows, I inputs, O outputs; R rows of an operand, N rows of the other one, K terms of the sum, B blocks
of the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lm_trainer.core.block_float import SIGNED, Blocks, block_exponents
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.target_platform import target_platform

BLOCK = 32
RESIDUAL = "block_scaled_product"
"""Name of the products for rematerialization policies, which do not recognize them as dots."""
_MANTISSA, _BIAS = 23, 127
"""Number of mantissa bits of a float32, and the exponent bias of float32 and e8m0."""


class Mxfp8(NamedTuple):
    """An operand in MXFP8; each number is its code times the scale of its block."""

    codes_RK: jax.Array
    """float8_e4m3fn codes; K is a multiple of 32."""
    scales_RB: jax.Array
    """float8_e8m0fnu scales, one per 32 codes of a row."""


def to_mxfp8(x_RK: jax.Array) -> Mxfp8:
    """Rounds each number to the nearest code, ties to even, with the smallest scale at which its block does not
    saturate.

    Rows are padded with zeros to a multiple of 32. A block with a non-finite number becomes NaN. The smallest scale is
    2^-117, at which the smallest code represents the smallest normal float32.
    """
    length = x_RK.shape[1]
    x_RB32 = jnp.pad(x_RK, ((0, 0), (0, -length % BLOCK))).reshape(len(x_RK), -1, BLOCK)
    # Stays in floating point until the blocks are reduced to their maxima: converting all elements to integers would
    # allocate extra memory.
    largest_RB = jnp.max(jnp.abs(x_RB32), axis=2).astype(jnp.float32)
    scales_RB = block_exponents(largest_RB, SIGNED, Blocks(1, 1)) - jnp.uint8(SIGNED.highest)
    # A product with a power of two is exact; on some devices a quotient is not.
    bits_RB = (2 * _BIAS - scales_RB.astype(jnp.int32)) << _MANTISSA
    inverse_RB = jax.lax.bitcast_convert_type(bits_RB, jnp.float32)
    # NaN for the whole block, because a saturating conversion turns infinities into finite numbers.
    inverse_RB = jnp.where(jnp.isfinite(largest_RB), inverse_RB, jnp.nan)
    codes_RB32 = (x_RB32.astype(jnp.float32) * inverse_RB[..., None]).astype(jnp.float8_e4m3fn)
    scales_RB = jax.lax.bitcast_convert_type(scales_RB, jnp.float8_e8m0fnu)
    return Mxfp8(codes_RB32.reshape(len(x_RK), -1), scales_RB)


def matmul_transposed(x_RK: jax.Array, y_NK: jax.Array) -> jax.Array:
    """Multiplies each row of x with each row of y in MXFP8; returns [R, N] in the dtype of x.

    NVIDIA GPUs from Blackwell on have instructions for this product. On other platforms it multiplies the same numbers
    in bfloat16 or float32, which represent each of them exactly.

    Args:
        x_RK: floating-point array.
        y_NK: floating-point array.
    """
    x, y = to_mxfp8(x_RK), to_mxfp8(y_NK)
    # float16 cannot represent the scales.
    dtype = jnp.bfloat16 if x_RK.dtype == jnp.bfloat16 else jnp.float32
    if target_platform() == "gpu":
        batches = (array[None] for array in (x.codes_RK, y.codes_RK, x.scales_RB, y.scales_RB))
        product_RN = jax.nn.scaled_matmul(*batches, preferred_element_type=dtype)[0]
    else:
        product_RN = jax.lax.scaled_dot(
            x.codes_RK,
            y.codes_RK,
            lhs_scale=x.scales_RB,
            rhs_scale=y.scales_RB,
            dimension_numbers=(((1,), (1,)), ((), ())),
            preferred_element_type=dtype,
        )
    return product_RN.astype(x_RK.dtype)


def block_size_mismatch(inputs: int, outputs: int) -> str | None:
    """Returns the reason why a linear map of this size cannot use MXFP8 products; None if it can."""
    if inputs % BLOCK == 0 and outputs % BLOCK == 0:
        return None
    return (
        f"mxfp8 has a scale for each {BLOCK} numbers, and this linear map has {inputs} inputs and {outputs} outputs; "
        f"choose multiples of {BLOCK}, name other linear maps as targets, or write type: fp8"
    )


@dataclass(frozen=True)
class Mxfp8Matmul:
    """`matmul(x_MI, w_IO)`: the product of the matrices, rounded to MXFP8, in the dtype of `x_MI`.

    The gradient ignores the rounding (straight-through).
    """

    backward: bool
    """Compute the products of the backward pass in MXFP8 too, instead of in the dtype of the operands."""

    def __call__(self, x_MI: jax.Array, w_IO: jax.Array) -> jax.Array:
        """Returns [M, O].

        Raises:
            UserError: if a block would be incomplete; results would then depend on how devices share the product.
        """
        if reason := block_size_mismatch(*w_IO.shape):
            raise UserError(f"trainer.quantization: on each device {reason}")
        return checkpoint_name(_matmul(x_MI, w_IO, self.backward), RESIDUAL)


_Operands = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x_MI: jax.Array, w_IO: jax.Array, backward: bool) -> jax.Array:
    del backward
    return matmul_transposed(x_MI, w_IO.T)


def _forward(x_MI: jax.Array, w_IO: jax.Array, backward: bool) -> tuple[jax.Array, _Operands]:
    return _matmul(x_MI, w_IO, backward), (x_MI, w_IO)


def _backward(backward: bool, operands: _Operands, g_MO: jax.Array) -> _Operands:
    x_MI, w_IO = operands
    if backward:
        return matmul_transposed(g_MO, w_IO), matmul_transposed(x_MI.T, g_MO.T)
    return jnp.matmul(g_MO, w_IO.T), jnp.matmul(x_MI.T, g_MO)


_matmul.defvjp(_forward, _backward)
