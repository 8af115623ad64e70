"""Collectives between the devices that compute one microbatch together, in `shard_map` over the axes `GROUP_AXES`.

Where an axis is not there, or has one device, each of these is the identity. Sums are `tree_sum`s in float32: their
order is fixed, and a compiler cannot change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lm_trainer.parallel.mesh import GROUP_AXES
from lm_trainer.parallel.ordered_sum import tree_sum


def axis_size(axis: str) -> int:
    """Over how many devices `axis` of the group cuts what is being traced; 1 outside of `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def axis_index(axis: str) -> jax.Array:
    """The place of this device along `axis`, int32; only where `axis_size` is above 1."""
    return lax.axis_index(axis)


def sharded_axes() -> tuple[str, ...]:
    """The axes that cut what is being traced."""
    return tuple(axis for axis in GROUP_AXES if axis_size(axis) > 1)


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The pieces of all devices along `axis`, put together along the dimension `dim`; the gradient is `scatter_sum`."""
    if axis_size(axis) == 1:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    return _gather(x, axis, dim)


def scatter_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's piece along `dim` of the sum over `axis`; the gradient is `gather`."""
    return x if axis_size(axis) == 1 else _scatter_sum(x, axis, dim)


def total(x: jax.Array) -> jax.Array:
    """The sum of a small array over the whole group, on all its devices. No gradient flows through it."""
    axes = sharded_axes()
    return tree_sum(lax.all_gather(lax.stop_gradient(x), axes)) if axes else x


def sum_over(x: jax.Array, axes: Sequence[str], dim: int | None) -> jax.Array:
    """The sum over `axes` on all their devices, with a ring's volume where `dim` can be cut, else gathered whole."""
    axes = tuple(axis for axis in axes if axis_size(axis) > 1)
    if not axes:
        return x
    if dim is None:
        return tree_sum(lax.all_gather(x, axes))
    return lax.all_gather(_summed_piece(x, axes, dim), axes, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def _gather_forward(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, None]:
    return _gather(x, axis, dim), None


def _gather_backward(axis: str, dim: int, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    return (_summed_piece(cotangent, (axis,), dim),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return _summed_piece(x, (axis,), dim)


def _scatter_forward(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, None]:
    return _scatter_sum(x, axis, dim), None


def _scatter_backward(axis: str, dim: int, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    return (lax.all_gather(cotangent, axis, axis=dim, tiled=True),)


_scatter_sum.defvjp(_scatter_forward, _scatter_backward)


def _summed_piece(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Each device sends every other one its piece, and adds what it receives."""
    count = math.prod(map(axis_size, axes))
    x = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    received = lax.all_to_all(jnp.moveaxis(x, dim, 0), axes, split_axis=0, concat_axis=0, tiled=True)
    return tree_sum(received.astype(jnp.float32)).astype(x.dtype)
