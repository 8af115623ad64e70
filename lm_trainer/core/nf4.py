"""Matrices in 4-bit NormalFloat (NF4) with double quantization (Dettmers et al. 2023, arXiv 2305.14314, section 3).

The arrays have the order and the rounding of bitsandbytes: a matrix is read row by row, with one row per output. Each
block of 64 elements is divided by its largest absolute value, and each quotient is replaced by the nearest of 16
values. The largest absolute values themselves, minus their mean, are stored in 8 bits, in groups of 256 blocks.

Shape letters: O outputs, I inputs, C bytes with two codes each (I / 2), N elements (O x I), K blocks, G groups of
blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

BLOCK, GROUP = 64, 256
"""Number of elements of a block, and number of blocks of a group."""

NF4_VALUES = np.array(
    # Quantiles of the normal distribution (equation 4), as in appendix E.
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Value of each code, float32 [16], ascending."""
_ZERO_CODE = 7
_DECADES = 7


def _dynamic_values() -> np.ndarray:
    """Returns the 256 values of the 8-bit type for scales (Dettmers 2016, arXiv 1511.04561, section 2.3).

    A decade further from 1 has half as many values.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        bounds = _even_steps(2**decade)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (decade - _DECADES + 1)) * means
        values += [*scaled.tolist(), *(-scaled).tolist()]
    return np.array(sorted(values), np.float32)


def _even_steps(count: int) -> np.ndarray:
    """Returns `count + 1` float32 numbers from 0.1 to 1, rounded as torch rounds them: from the nearer end."""
    step, index = float(np.float32(0.9 / count)), np.arange(count + 1)
    from_start, from_end = float(np.float32(0.1)) + step * index, 1.0 - step * (count - index)
    return np.where(index < (count + 1) // 2, from_start, from_end).astype(np.float32)


SCALE_VALUES = _dynamic_values()
"""Value of each 8-bit code of a scale, float32 [256], ascending."""


class Nf4Matrix(NamedTuple):
    """The arrays of a quantized matrix. All may have the same leading dimensions."""

    codes: np.ndarray
    """uint8 [O, C]; the code of the first of two elements is in the upper four bits."""
    scales: np.ndarray
    """uint8 [K]; codes of the largest absolute value of each block."""
    group_scales: np.ndarray
    """float32 [G]; factor of the scales of each group."""
    offset: np.ndarray
    """float32 []; mean of the largest absolute values, added to all scales."""


def matrix_shapes(outputs: int, inputs: int) -> Nf4Matrix:
    """Returns arrays without memory of their own that have the shapes and dtypes of a quantized matrix."""
    blocks = -(-outputs * inputs // BLOCK)

    def empty(shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    return Nf4Matrix(
        empty((outputs, inputs // 2), np.uint8),
        empty((blocks,), np.uint8),
        empty((-(-blocks // GROUP),), np.float32),
        empty((), np.float32),
    )


def quantize_matrix(w_OI: np.ndarray) -> Nf4Matrix:
    """Quantizes a matrix of any float dtype with an even number of inputs, and converts it to float32 before.

    The result depends on the values alone. A block of zeros gets the code of zero.
    """
    w_N = np.ascontiguousarray(w_OI, np.float32).reshape(-1)
    codes_N, absmax_K = _quantize_blocks(w_N, NF4_VALUES, BLOCK)
    # The exactly rounded sum, which no order of additions changes.
    offset = np.float32(math.fsum(absmax_K.tolist()) / len(absmax_K))
    scales_K, group_scales_G = _quantize_blocks(absmax_K - offset, SCALE_VALUES, GROUP)
    codes_N[np.repeat(absmax_K == 0, BLOCK)[: len(codes_N)]] = _ZERO_CODE
    packed = (codes_N[::2] << 4) | codes_N[1::2]
    return Nf4Matrix(packed.reshape(len(w_OI), -1), scales_K, group_scales_G, np.array(offset))


def dequantize_matrix(matrix: Nf4Matrix) -> np.ndarray:
    """Returns the values of a quantized matrix, float32 [O, I]."""
    codes_OC = matrix.codes
    codes_N = np.stack([codes_OC >> 4, codes_OC & 15], axis=-1).reshape(-1)
    scales_K = block_scales(matrix)
    values_N = NF4_VALUES[codes_N] * np.repeat(scales_K, BLOCK)[: len(codes_N)]
    return values_N.reshape(len(codes_OC), -1)


def block_scales(matrix: Nf4Matrix) -> np.ndarray:
    """Returns the factors of the blocks, float32 [K]."""
    return dequantize_scales(matrix.scales, matrix.group_scales, matrix.offset, SCALE_VALUES)


def dequantize_scales(
    scales_K: np.ndarray, group_scales_G: np.ndarray, offset: np.ndarray, values: np.ndarray, *, size: int = GROUP
) -> np.ndarray:
    """Returns the factors of the blocks, float32 [K], for any 8-bit type with the given values and size of groups."""
    return values[scales_K] * np.repeat(group_scales_G, size)[: len(scales_K)] + np.float32(offset)


def _quantize_blocks(x_N: np.ndarray, values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the code of the value nearest to each element divided by the largest absolute value of its block,
    uint8 [N], and these largest absolute values, float32.
    """
    starts = np.arange(0, len(x_N), size)
    absmax = np.maximum.reduceat(np.abs(x_N), starts)
    with np.errstate(divide="ignore"):
        factors = np.float32(1) / absmax
    # A block of zeros has no scale.
    factors[absmax == 0] = 0
    codes_N = np.empty(len(x_N), np.uint8)
    # A few blocks at a time, so that the temporary arrays fit into a cache.
    step = 4096 * size
    for start in range(0, len(x_N), step):
        x = x_N[start : start + step]
        block = slice(start // size, start // size + -(-len(x) // size))
        scaled = np.clip(x * np.repeat(factors[block], size)[: len(x)], -1, 1)
        upper = np.clip(np.searchsorted(values, scaled), 1, len(values) - 1)
        # The distances are compared as bitsandbytes does: rounded, and in a tie the smaller value is taken.
        nearer_lower = scaled - values[upper - 1] <= values[upper] - scaled
        codes_N[start : start + step] = upper - nearer_lower
    return codes_N, absmax
