"""Grouped products with JAX's megablox kernels for TPUs (Gale et al. 2022, arXiv 2211.15841).

Tiles follow from the shapes and the dtype, so the bits follow from the arguments alone.

Shape letters: P slots, D width of a row, F width of a result, E groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lm_trainer.nn.expert_slots import Slots

SLOT_MULTIPLE = 512
"""The number of slots must be a multiple of this number, the largest number of slots of a tile."""
_TILES_OF_GROUP = 8
"""Smallest mean number of tiles of a group. A tile at the border of two groups is computed for both, so the kernels
compute at most an eighth too much, unless tiles of the fewest slots are too large for the groups."""
_FEWEST_SLOTS = 128
"""Rows of the matrix unit, which a smaller tile would not fill."""
_SIDE, _LANES = 1024, 128
_ROW_BYTES, _MATRIX_BYTES = 2**20, 4 * 2**20
"""Largest tiles of rows and matrices. Two buffers of each fit the 16 MiB that compilers give a kernel."""


def tile_slots(slots: int, groups: int) -> int:
    """Returns the number of slots of a tile."""
    sizes = (SLOT_MULTIPLE, SLOT_MULTIPLE // 2)
    return next((size for size in sizes if slots >= _TILES_OF_GROUP * size * groups), _FEWEST_SLOTS)


def megablox_product(x_PD: jax.Array, w_EDF: jax.Array, slots: Slots, *, interpret: bool = False) -> jax.Array:
    """Multiplies the rows of each group with its matrix. The results of slots after all groups are zero.

    Args:
        x_PD: rows, sorted by group, without empty slots between groups.
        w_EDF: matrices in the dtype of the rows.
        slots: groups of the rows.
        interpret: emulate the kernels, on any platform.

    Returns:
        [P, F] in the dtype of the rows.
    """
    # The kernels leave the rows of empty slots, and of their gradients, as they are in memory, so they are zeroed.
    used_P1 = (jnp.arange(x_PD.shape[0]) < jnp.sum(slots.counts_E))[:, None]
    y_PF: Any = _product(interpret, jnp.where(used_P1, x_PD, 0), w_EDF, slots.counts_E)
    return jnp.where(used_P1, y_PF, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(interpret: bool, x_PD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array) -> jax.Array:
    return _multiply(x_PD, w_EDF, counts_E, transposed=False, interpret=interpret)


def _product_forward(
    interpret: bool, x_PD: jax.Array, w_EDF: jax.Array, counts_E: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _product(interpret, x_PD, w_EDF, counts_E), (x_PD, w_EDF, counts_E)


def _product_backward(
    interpret: bool, residuals: tuple[jax.Array, jax.Array, jax.Array], cotangent_PF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x_PD, w_EDF, counts_E = residuals
    dx_PD = _multiply(cotangent_PF, w_EDF, counts_E, transposed=True, interpret=interpret)
    dim, width = w_EDF.shape[1:]
    # The kernel adds in float32, in a tile of the gradient that stays in vector memory.
    side = _SIDE * 2 // w_EDF.dtype.itemsize
    tiles = (tile_slots(x_PD.shape[0], w_EDF.shape[0]), _divide(dim, side), _divide(width, _SIDE))
    dw_EDF = tgmm(x_PD.T, cotangent_PF, counts_E, w_EDF.dtype, tiles, interpret=interpret)
    return dx_PD, dw_EDF, None


_product.defvjp(_product_forward, _product_backward)


def _multiply(x: jax.Array, w: jax.Array, counts_E: jax.Array, *, transposed: bool, interpret: bool) -> jax.Array:
    """Multiplies rows [P, D] with matrices [E, D, F]; `transposed`: rows [P, F] with the matrices transposed."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    inner, outer = w.shape[1:][:: -1 if transposed else 1]
    rows = tile_slots(x.shape[0], w.shape[0])
    # Tiles that contain the whole contraction read each matrix once for all tiles of its group.
    terms = _divide(inner, _ROW_BYTES // (rows * x.dtype.itemsize))
    columns = _divide(outer, min(_SIDE, _MATRIX_BYTES // (terms * x.dtype.itemsize)))
    return gmm(x, w, counts_E, x.dtype, (rows, terms, columns), transpose_rhs=transposed, interpret=interpret)


def _divide(size: int, largest: int) -> int:
    """Returns the side of tiles that divide a dimension evenly, a multiple of the lanes of a vector register."""
    count = -(-size // largest)
    return -(-size // (count * _LANES)) * _LANES
