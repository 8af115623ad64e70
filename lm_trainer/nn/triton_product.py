"""Grouped products with Pallas kernels for NVIDIA GPUs since Ampere.

Each program of a kernel computes one tile of the result and adds all of its terms in the order of the slots, without
atomics. The tiles are equal on all GPUs, so the bits do not depend on the kind of GPU's number of multiprocessors.

Shape letters: P slots, D width of a row, F width of a result, E groups, N blocks of slots, R slots of a block, C columns
of a tile, K terms that are added at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.nn.expert_slots import Slots

SLOTS = 128
"""Slots of a block. The slots of each group must start at a multiple of it, so that a block belongs to one group."""
_COLUMNS = 128
_TERM_BYTES = 128
"""Bytes of the terms of a row that are added at once. Three buffers of these tiles need 96 KiB of shared memory, which
every GPU with a compute capability of 8.0 or more has."""
_WARPS, _BUFFERS = 8, 3
_SMALLEST = 16
"""Smallest side of a tile that Triton multiplies."""

PRODUCT_NAME, GRADIENT_NAME = "grouped_product", "grouped_gradient"
"""Names of the kernels in compiled programs."""

Ref = Any
"""An array in device memory, inside a kernel; JAX does not export its type."""


class _Groups(NamedTuple):
    """Blocks of slots of each group."""

    expert_N: jax.Array
    used_1: jax.Array
    """Number of blocks that have slots in use, which come first."""
    start_E: jax.Array
    """First slot of each group."""
    count_E: jax.Array


def grouped_product(x_PD: jax.Array, w_EDF: jax.Array, slots: Slots, *, interpret: bool = False) -> jax.Array:
    """Multiplies the rows of each group with its matrix; `interpret` emulates the kernels.

    Args:
        x_PD: rows, bfloat16 or float32. The slots of a group start at a multiple of `SLOTS`, and so does their end.
        w_EDF: matrices in the dtype of the rows.
        slots: groups of the rows.
        interpret: compute with JAX's interpreter, on any platform.

    Returns:
        [P, F] in the dtype of the rows. Products of float32 have the precision of `jax_default_matmul_precision`.
    """
    blocks_E = -(-slots.counts_E // SLOTS)
    ends_E = jnp.cumsum(blocks_E)
    starts_E = SLOTS * (ends_E - blocks_E)
    groups = _Groups(slots.expert_P[::SLOTS], ends_E[-1:], starts_E, slots.counts_E)
    return _product(interpret, x_PD, w_EDF, _Groups(*(x.astype(jnp.int32) for x in groups)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(interpret: bool, x_PD: jax.Array, w_EDF: jax.Array, groups: _Groups) -> jax.Array:
    return _multiply(x_PD, w_EDF, groups, transposed=False, interpret=interpret)


def _product_forward(
    interpret: bool, x_PD: jax.Array, w_EDF: jax.Array, groups: _Groups
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, _Groups]]:
    return _product(interpret, x_PD, w_EDF, groups), (x_PD, w_EDF, groups)


def _product_backward(
    interpret: bool, residuals: tuple[jax.Array, jax.Array, _Groups], cotangent_PF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_PD, w_EDF, groups = residuals
    dx_PD = _multiply(cotangent_PF, w_EDF, groups, transposed=True, interpret=interpret)
    return dx_PD, _multiply_transposed_rows(x_PD, cotangent_PF, groups, interpret=interpret), None


_product.defvjp(_product_forward, _product_backward)


def _multiply(x: jax.Array, w: jax.Array, groups: _Groups, *, transposed: bool, interpret: bool) -> jax.Array:
    """Multiplies rows [P, D] with matrices [E, D, F]; `transposed`: rows [P, F] with the matrices transposed."""
    from jax.experimental import pallas as pl

    inner, outer = w.shape[1:][:: -1 if transposed else 1]
    columns, terms = _tile(outer, _COLUMNS), _tile(inner, _TERM_BYTES // x.dtype.itemsize)

    def grouped_product(x_ref: Ref, w_ref: Ref, expert_ref: Ref, used_ref: Ref, y_ref: Ref) -> None:
        column, block = pl.program_id(0), pl.program_id(1)
        expert, rows, outside = expert_ref[block], (block * SLOTS, SLOTS, x.shape[0]), (column * columns, columns, outer)

        def add(i: jax.Array, y_RC: jax.Array) -> jax.Array:
            inside = (i * terms, terms, inner)
            x_RK = _load(x_ref, rows, inside)
            tile = _load(w_ref, *((outside, inside) if transposed else (inside, outside)), group=(expert,))
            return y_RC + pl.dot(x_RK, tile, trans_b=transposed)

        # Blocks without slots in use add nothing, and their results are zero.
        steps = jnp.where(block < used_ref[0], pl.cdiv(inner, terms), 0)
        y_RC = jax.lax.fori_loop(0, steps, add, jnp.zeros((SLOTS, columns), jnp.float32))
        _store(y_ref, rows, outside, y_RC)

    grid = (pl.cdiv(outer, columns), groups.expert_N.shape[0])
    call = _make_call(grouped_product, PRODUCT_NAME, grid, (x.shape[0], outer), x.dtype, interpret=interpret)
    return call(x, w, groups.expert_N, groups.used_1)


def _multiply_transposed_rows(x_PD: jax.Array, y_PF: jax.Array, groups: _Groups, *, interpret: bool) -> jax.Array:
    """Returns the product of the transposed rows of each group with the other rows of the group, [E, D, F]."""
    from jax.experimental import pallas as pl

    slots, dim, width = *x_PD.shape, y_PF.shape[1]
    rows, columns = _tile(dim, _COLUMNS), _tile(width, _COLUMNS)
    terms = _TERM_BYTES // x_PD.dtype.itemsize

    def grouped_gradient(x_ref: Ref, y_ref: Ref, start_ref: Ref, count_ref: Ref, w_ref: Ref) -> None:
        column, row, expert = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        start, above, beside = start_ref[expert], (row * rows, rows, dim), (column * columns, columns, width)

        def add(i: jax.Array, w_RC: jax.Array) -> jax.Array:
            # The slots from the last one in use up to the end of its block are empty, and their rows are zero.
            inside = (start + i * terms, terms, slots)
            return w_RC + pl.dot(_load(x_ref, inside, above), _load(y_ref, inside, beside), trans_a=True)

        w_RC = jnp.zeros((rows, columns), jnp.float32)
        w_RC = jax.lax.fori_loop(0, pl.cdiv(count_ref[expert], terms), add, w_RC)
        _store(w_ref, above, beside, w_RC, group=(expert,))

    grid = (pl.cdiv(width, columns), pl.cdiv(dim, rows), groups.start_E.shape[0])
    shape = (groups.start_E.shape[0], dim, width)
    call = _make_call(grouped_gradient, GRADIENT_NAME, grid, shape, x_PD.dtype, interpret=interpret)
    return call(x_PD, y_PF, groups.start_E, groups.count_E)


def _make_call(
    kernel: Callable[..., None], name: str, grid: tuple[int, ...], shape: tuple[int, ...], dtype: Any, *, interpret: bool
) -> Callable[..., jax.Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, dtype),
        grid=grid,
        name=name,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_BUFFERS),
        interpret=interpret,
    )


def _tile(size: int, largest: int) -> int:
    """Returns the side of a tile: a power of two, as Triton needs it."""
    return min(largest, max(_SMALLEST, 1 << (size - 1).bit_length()))


_Span = tuple[jax.Array, int, int]
"""First index, number of indices, and size of the dimension. The indices may reach past its end."""


def _mask(*spans: _Span) -> jax.Array | None:
    """Returns which elements of a tile are within the array, or None if all are."""
    shape = tuple(count for _, count, _ in spans)
    masks = [
        jnp.broadcast_to(jnp.expand_dims(start + jnp.arange(count) < size, 1 - axis), shape)
        for axis, (start, count, size) in enumerate(spans)
        if size % count
    ]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref: Ref, rows: _Span, columns: _Span, *, group: tuple[jax.Array, ...] = ()) -> jax.Array:
    """Reads a tile, of the matrix of a group if there is one; elements past the end of the array are zero."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    mask, tile = _mask(rows, columns), ref.at[(*group, pl.ds(*rows[:2]), pl.ds(*columns[:2]))]
    return triton.load(tile, mask=mask, other=None if mask is None else 0)


def _store(ref: Ref, rows: _Span, columns: _Span, value: jax.Array, *, group: tuple[jax.Array, ...] = ()) -> None:
    """Writes a tile in the dtype of the array; elements past its end are left out."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tile = ref.at[(*group, pl.ds(*rows[:2]), pl.ds(*columns[:2]))]
    triton.store(tile, value.astype(ref.dtype), mask=_mask(rows, columns))
