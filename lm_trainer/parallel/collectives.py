"""Collectives among the devices of a model-parallel group, called under `shard_map` over `MODEL_PARALLEL_AXES`.

Along an axis that does not exist or has one device, each collective is the identity. Every sum is a `tree_sum` in
float32, so its order is fixed, whereas `lax.psum` and `lax.psum_scatter` leave the order to the backend.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES
from lm_trainer.parallel.tree_sum import tree_sum

Tree = TypeVar("Tree")

_batch_parts: ContextVar[int] = ContextVar("batch_parts", default=1)


@contextmanager
def batch_in_parts(count: int) -> Iterator[None]:
    """Declares, while a computation is traced, that its rows are divided equally among `count` devices."""
    token = _batch_parts.set(count)
    try:
        yield
    finally:
        _batch_parts.reset(token)


def num_batch_parts() -> int:
    """Returns the number of devices that share the rows of the traced computation equally; 1 for one device."""
    return _batch_parts.get()


def axis_size(axis: str) -> int:
    """Returns the number of devices along `axis` that share the traced computation; 1 outside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def axis_index(axis: str) -> jax.Array:
    """Returns the index of this device along `axis`, an int32 scalar. Only valid if `axis_size` is above 1."""
    return lax.axis_index(axis)


def sharded_axes() -> tuple[str, ...]:
    """Returns the model-parallel axes that shard the traced computation."""
    return tuple(axis for axis in MODEL_PARALLEL_AXES if axis_size(axis) > 1)


def device_key(key: jax.Array) -> jax.Array:
    """Returns a random key for this device if several devices share the traced computation; otherwise `key`."""
    for axis in sharded_axes():
        # Devices have different rows or positions, so they must not all drop the same elements.
        key = jax.random.fold_in(key, axis_index(axis))
    return key


def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Concatenates the shards of all devices along `axis` in dimension `dim`; its gradient is `reduce_scatter`."""
    if axis_size(axis) == 1:
        return x
    # Integers (tokens, positions, segments) have no gradient, which a custom gradient rule would have to handle.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    return _gather(x, axis, dim)


def gather_on_first_device(x_BS: jax.Array) -> jax.Array:
    """Gathers the rows and positions of all devices, [all B, all S], on one device; the other devices get zeros.

    The sum over the devices therefore equals the gathered array.
    """
    axes = sharded_axes()
    if not axes:
        return x_BS
    # Rows are sharded over `pipeline` first and then over `expert`.
    for axis, dim in (("context", 1), ("expert", 0), ("pipeline", 0)):
        x_BS = all_gather(x_BS, axis, dim)
    return jnp.where(sum(axis_index(axis) for axis in axes) == 0, x_BS, 0.0)


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Sums over `axis` and returns this device's shard of the sum along `dim`; its gradient is `all_gather`."""
    return x if axis_size(axis) == 1 else _scatter_sum(x, axis, dim)


def group_sum(x: jax.Array) -> jax.Array:
    """Sums a small array over all devices of the group, which all receive the sum. No gradient flows through it."""
    axes = sharded_axes()
    return tree_sum(lax.all_gather(lax.stop_gradient(x), axes)) if axes else x


def axis_sum(x: jax.Array, axis: str) -> jax.Array:
    """Sums a small array over the devices along `axis`, which all receive the sum. No gradient flows through it."""
    return x if axis_size(axis) == 1 else tree_sum(lax.all_gather(lax.stop_gradient(x), axis))


def all_reduce(x: jax.Array, axes: Sequence[str], dim: int | None) -> jax.Array:
    """Sums over `axes`. All devices along these axes receive the sum.

    Args:
        x: the term of this device.
        axes: the mesh axes.
        dim: a dimension that is divisible by the number of devices, so that the traffic equals a ring all-reduce. None:
            each device gathers all terms.
    """
    axes = tuple(axis for axis in axes if axis_size(axis) > 1)
    if not axes:
        return x
    if dim is None:
        return tree_sum(lax.all_gather(x, axes))
    return lax.all_gather(_reduce_to_shard(x, axes, dim), axes, axis=dim, tiled=True)


def all_max(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns the maximum over `axes`, which all devices along these axes receive."""
    axes = tuple(axis for axis in axes if axis_size(axis) > 1)
    return lax.pmax(x, axes) if axes else x


def permute(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends `x` along `axis` from the first to the second device of each pair. Its gradient goes the opposite way."""
    return lax.ppermute(x, axis, pairs)


def rotate(tree: Tree, axis: str, hop: int) -> Tree:
    """Sends every array of `tree` to the device `hop` places further along `axis`, with wrap-around."""
    devices = axis_size(axis)
    if hop % devices == 0:
        return tree
    pairs = [(i, (i + hop) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


# The built-in gradient of `all_gather` is `psum_scatter`, which adds in an order chosen by the backend. Both
# collectives therefore have custom gradients.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def _gather_forward(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, None]:
    return _gather(x, axis, dim), None


def _gather_backward(axis: str, dim: int, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    return (_reduce_to_shard(cotangent, (axis,), dim),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return _reduce_to_shard(x, (axis,), dim)


def _scatter_forward(x: jax.Array, axis: str, dim: int) -> tuple[jax.Array, None]:
    return _scatter_sum(x, axis, dim), None


def _scatter_backward(axis: str, dim: int, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    return (lax.all_gather(cotangent, axis, axis=dim, tiled=True),)


_scatter_sum.defvjp(_scatter_forward, _scatter_backward)


def _reduce_to_shard(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns this device's shard of the sum: devices send each other their shards, and add what they receive."""
    count = math.prod(map(axis_size, axes))
    x = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    # Shards become the leading dimension, so received terms are stacked in device order, which is the order of the sum.
    received = lax.all_to_all(jnp.moveaxis(x, dim, 0), axes, split_axis=0, concat_axis=0, tiled=True)
    # bfloat16 sums would lose a bit of precision with each addition.
    return tree_sum(received.astype(jnp.float32)).astype(x.dtype)
