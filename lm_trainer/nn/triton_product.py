"""Grouped products with Pallas kernels for NVIDIA GPUs since Ampere.

Each program of a kernel computes one tile of the result and adds all of its terms in the order of the slots, without
atomics. The tiles follow from the shapes and are equal on all GPUs, so the bits follow from the arguments alone.

Shape letters: P slots, D width of a row, F width of a result, E groups, N tiles of slots, R slots of a tile, C columns
of a tile, K terms that are added at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.nn.expert_slots import Slots

_SIDE = 128
"""Largest side of a tile of the result."""
_TERM_BYTES = 128
"""Bytes of the terms of a row that are added at once. Three buffers of these tiles need 96 KiB of shared memory, which
every GPU with a compute capability of 8.0 or more has."""
_WARPS, _BUFFERS = 8, 3
_SMALLEST = 16
"""Smallest side of a tile that Triton multiplies."""
_SLOTS_OF_LARGE_GROUPS = 256
"""Mean size of a group from which on tiles have the largest number of slots. For smaller groups, half of this number
wastes less, because the last tile of a group is half empty in the mean."""

PRODUCT_NAME, GRADIENT_NAME = "grouped_product", "grouped_gradient"
"""Names of the kernels in compiled programs."""

Ref = Any
"""An array in device memory, inside a kernel; JAX does not export its type."""


class _Groups(NamedTuple):
    """Tiles of slots that each belong to one group, and the first and last slots of groups and tiles."""

    expert_N: jax.Array
    start_N: jax.Array
    end_N: jax.Array
    """End of the group of a tile."""
    used_N: jax.Array
    """1 for tiles of a group, and 0 for tiles of the slots after all groups, whose results are zero."""
    start_E: jax.Array
    end_E: jax.Array


def tile_slots(slots: int, groups: int) -> int:
    """Returns the number of slots of a tile."""
    return _SIDE if slots >= _SLOTS_OF_LARGE_GROUPS * groups else _SIDE // 2


def grouped_product(x_PD: jax.Array, w_EDF: jax.Array, slots: Slots, *, interpret: bool = False) -> jax.Array:
    """Multiplies the rows of each group with its matrix. The results of slots after all groups are zero.

    Args:
        x_PD: rows, sorted by group, without empty slots between groups; bfloat16 or float32.
        w_EDF: matrices in the dtype of the rows.
        slots: groups of the rows.
        interpret: emulate the kernels, on any platform.

    Returns:
        [P, F] in the dtype of the rows. Products of float32 have the precision of `jax_default_matmul_precision`.
    """
    return _product(interpret, x_PD, w_EDF, _divide(slots.counts_E, x_PD.shape[0]))


def _divide(counts_E: jax.Array, slots: int) -> _Groups:
    """Divides the slots of each group into tiles. The last tile of a group may be partly empty."""
    rows, experts = tile_slots(slots, counts_E.shape[0]), counts_E.shape[0]
    ends_E = jnp.cumsum(counts_E)
    # The slots after all groups are one more group. Every group may add a tile that is partly empty.
    ends = jnp.append(ends_E, slots)
    starts = jnp.append(0, ends_E)
    tiles = -(-(ends - starts) // rows)
    tile_ends = jnp.cumsum(tiles)
    index_N = jnp.arange(slots // rows + experts + 1)
    group_N = jnp.minimum(jnp.searchsorted(tile_ends, index_N, side="right"), experts)
    start_N = starts[group_N] + rows * (index_N - (tile_ends - tiles)[group_N])
    groups = (jnp.minimum(group_N, experts - 1), start_N, ends[group_N], group_N < experts, starts[:-1], ends_E)
    return _Groups(*(x.astype(jnp.int32) for x in groups))


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
    rows, columns = tile_slots(x.shape[0], w.shape[0]), _tile(outer, _SIDE)
    terms = _tile(inner, _TERM_BYTES // x.dtype.itemsize)

    def grouped_product(x_ref: Ref, w_ref: Ref, *refs: Ref) -> None:
        expert_ref, start_ref, end_ref, used_ref, y_ref = refs
        column, tile = pl.program_id(0), pl.program_id(1)
        group, slots = (expert_ref[tile],), _Span(start_ref[tile], rows, end_ref[tile])
        outside = _Span(column * columns, columns, outer)

        def add(i: jax.Array, y_RC: jax.Array) -> jax.Array:
            inside = _Span(i * terms, terms, inner)
            w_tile = _load(w_ref, *((outside, inside) if transposed else (inside, outside)), group=group)
            return y_RC + _dot(_load(x_ref, slots, inside), w_tile, sums=(1, 1 if transposed else 0))

        steps = used_ref[tile] * pl.cdiv(inner, terms)
        y_RC = jax.lax.fori_loop(0, steps, add, jnp.zeros((rows, columns), jnp.float32))
        _store(y_ref, slots, outside, y_RC)

    grid = (pl.cdiv(outer, columns), groups.expert_N.shape[0])
    result = jax.ShapeDtypeStruct((x.shape[0], outer), x.dtype)
    call = _make_call(grouped_product, PRODUCT_NAME, grid, result, interpret=interpret)
    return call(x, w, *groups[:4])


def _multiply_transposed_rows(x_PD: jax.Array, y_PF: jax.Array, groups: _Groups, *, interpret: bool) -> jax.Array:
    """Returns the product of the transposed rows of each group with the other rows of the group, [E, D, F]."""
    from jax.experimental import pallas as pl

    dim, width = x_PD.shape[1], y_PF.shape[1]
    rows, columns = _tile(dim, _SIDE), _tile(width, _SIDE)
    terms = _TERM_BYTES // x_PD.dtype.itemsize

    def grouped_gradient(x_ref: Ref, y_ref: Ref, start_ref: Ref, end_ref: Ref, w_ref: Ref) -> None:
        column, row, expert = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        start, end = start_ref[expert], end_ref[expert]
        above, beside = _Span(row * rows, rows, dim), _Span(column * columns, columns, width)

        def add(i: jax.Array, w_RC: jax.Array) -> jax.Array:
            slots = _Span(start + i * terms, terms, end)
            return w_RC + _dot(_load(x_ref, slots, above), _load(y_ref, slots, beside), sums=(0, 0))

        w_RC = jnp.zeros((rows, columns), jnp.float32)
        w_RC = jax.lax.fori_loop(0, pl.cdiv(end - start, terms), add, w_RC)
        _store(w_ref, above, beside, w_RC, group=(expert,))

    experts = groups.start_E.shape[0]
    grid = (pl.cdiv(width, columns), pl.cdiv(dim, rows), experts)
    result = jax.ShapeDtypeStruct((experts, dim, width), x_PD.dtype)
    call = _make_call(grouped_gradient, GRADIENT_NAME, grid, result, interpret=interpret)
    return call(x_PD, y_PF, groups.start_E, groups.end_E)


def _make_call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    result: jax.ShapeDtypeStruct,
    *,
    interpret: bool,
) -> Callable[..., jax.Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        result,
        grid=grid,
        name=name,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_BUFFERS),
        interpret=interpret,
    )


def _dot(x: jax.Array, y: jax.Array, *, sums: tuple[int, int]) -> jax.Array:
    """Multiplies two tiles, and adds over the dimensions `sums` of each."""
    numbers = ((sums[:1], sums[1:]), ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)


def _tile(size: int, largest: int) -> int:
    """Returns the side of a tile: a power of two, as Triton needs it."""
    return min(largest, max(_SMALLEST, 1 << (size - 1).bit_length()))


class _Span(NamedTuple):
    """Indices of one dimension of a tile, some of which may be past the last index that belongs to it."""

    start: jax.Array
    count: int
    end: int | jax.Array

    @property
    def inside(self) -> jax.Array | None:
        """True for indices before the end; None if all are."""
        if isinstance(self.end, int) and self.end % self.count == 0:
            return None
        return self.start + jnp.arange(self.count) < self.end


def _mask(rows: _Span, columns: _Span) -> jax.Array | None:
    """Returns which elements of a tile belong to it; None if all do."""
    shape, mask = (rows.count, columns.count), None
    if rows.inside is not None:
        mask = jnp.broadcast_to(rows.inside[:, None], shape)
    if columns.inside is not None:
        column_mask = jnp.broadcast_to(columns.inside[None, :], shape)
        mask = column_mask if mask is None else mask & column_mask
    return mask


def _select_tile(ref: Ref, rows: _Span, columns: _Span, group: tuple[jax.Array, ...]) -> Ref:
    """Returns the part of an array that a tile covers."""
    from jax.experimental import pallas as pl

    return ref.at[(*group, pl.ds(rows.start, rows.count), pl.ds(columns.start, columns.count))]


def _load(ref: Ref, rows: _Span, columns: _Span, *, group: tuple[jax.Array, ...] = ()) -> jax.Array:
    """Reads a tile, of the matrix of a group if there is one; elements that do not belong to it are zero."""
    from jax.experimental.pallas import triton

    mask = _mask(rows, columns)
    return triton.load(_select_tile(ref, rows, columns, group), mask=mask, other=None if mask is None else 0)


def _store(ref: Ref, rows: _Span, columns: _Span, value: jax.Array, *, group: tuple[jax.Array, ...] = ()) -> None:
    """Writes a tile in the dtype of the array; elements that do not belong to it are left out."""
    from jax.experimental.pallas import triton

    triton.store(_select_tile(ref, rows, columns, group), value.astype(ref.dtype), mask=_mask(rows, columns))
