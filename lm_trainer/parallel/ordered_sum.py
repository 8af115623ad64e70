"""Sums whose order never depends on the number of devices.

Floating-point addition is not associative, so `psum` and a plain reduction over sharded arrays give other bits on
other meshes. Here every sum is one fixed binary tree of element-wise additions, which no compiler may reorder.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards, spec_axes
from lm_trainer.parallel.sharding import ParamSharding

Item = TypeVar("Item")

_SMALL = 1 << 14
"""Elements up to which one exchange of whole arrays is quicker than two of slices."""

_PARTS = 8
"""What a pass of a sum of squares makes one of."""


class TreeSum(Generic[Item]):
    """Adds `count` items that arrive one by one, in the shape of a fixed tree, holding only log2(count) partial sums.

    With count = odd * 2^k the leaves of the binary tree are runs of `odd` items, added from the left. The tree over
    any aligned 1/2^j of the items is a subtree of the tree over all, which is what lets devices share the work.
    """

    def __init__(self, count: int, add: Callable[[Item, Item], Item]):
        self._run = count // (count & -count)
        self._count = count
        self._add = add
        self._run_sum: list[Item] = []
        self._pushed = 0
        self._levels: list[tuple[int, Item]] = []

    def push(self, item: Item) -> None:
        """Takes the next item; `add` may consume its first argument."""
        self._pushed += 1
        self._run_sum = [self._add(self._run_sum[0], item)] if self._run_sum else [item]
        if self._pushed % self._run:
            return
        level, total = 0, self._run_sum.pop()
        while self._levels and self._levels[-1][0] == level:
            total = self._add(self._levels.pop()[1], total)
            level += 1
        self._levels.append((level, total))

    def result(self) -> Item:
        """The sum of all items, once all have been pushed."""
        if self._pushed != self._count:
            raise ValueError(f"{self._pushed} of {self._count} items were pushed")
        return self._levels[0][1]


def most_held(count: int) -> int:
    """How many items exist at once, at most, while a `TreeSum` adds `count` of them: partial sums and the new item."""
    subtrees = count & -count
    return subtrees.bit_length() + (count > subtrees)


def tree_sum(x: jax.Array) -> jax.Array:
    """The sum over axis 0 in the order of `TreeSum`. The axis has any length of at least 1."""
    count = x.shape[0]
    run = count // (count & -count)
    x = x.reshape(count // run, run, *x.shape[1:])
    total = x[:, 0]
    for i in range(1, run):
        total = total + x[:, i]
    while total.shape[0] > 1:
        total = total[0::2] + total[1::2]
    return total[0]


def sum_over_shards(stacked: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh) -> dict:
    """Adds the contributions of all batch shards and leaves the sums where the state lies in storage.

    Each shard sends every other shard its slice and adds what it receives in the fixed order, so the volume is that of
    a ring reduce-scatter. Arrays that no dimension can be sliced along are cut as vectors, and come back whole; small
    ones are gathered.

    Args:
        stacked: name -> [shards, ...], the first axis cut over the batch axes, the rest as in `compute`.
        param_shardings: the param_sharding of each array without its first axis.
        mesh: the device mesh.

    Returns:
        name -> [...], to be constrained to the `rest` sharding by the caller's `out_shardings`.
    """
    shards = batch_shards(mesh)
    if shards == 1:
        return {name: x[0] for name, x in stacked.items()}

    def reduce(local: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: _sum_leaf(x[0], param_shardings[name], mesh) for name, x in local.items()}

    in_specs = {name: PartitionSpec(BATCH_AXES, *param_shardings[name].compute) for name in stacked}
    out_specs = {name: _summed_spec(param_shardings[name], mesh) for name in stacked}
    return jax.shard_map(reduce, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(dict(stacked))


def _can_slice(param_sharding: ParamSharding, mesh: Mesh) -> bool:
    return param_sharding.sum_dim is not None and param_sharding.chunks % batch_shards(mesh) == 0


def _rests_on_data(param_sharding: ParamSharding) -> bool:
    return param_sharding.sum_dim is not None and "data" in spec_axes(param_sharding.storage[param_sharding.sum_dim])


def _summed_spec(param_sharding: ParamSharding, mesh: Mesh) -> PartitionSpec:
    dim = param_sharding.sum_dim
    if dim is None or not (_can_slice(param_sharding, mesh) and _rests_on_data(param_sharding)):
        return param_sharding.compute
    entries = list(param_sharding.compute)
    entries[dim] = "data"
    return PartitionSpec(*entries)


def _sum_leaf(x: jax.Array, param_sharding: ParamSharding, mesh: Mesh) -> jax.Array:
    dim = param_sharding.sum_dim
    if dim is None or not _can_slice(param_sharding, mesh):
        return _sum_vector(x, batch_shards(mesh))
    data = mesh.shape["data"]
    replicas = batch_shards(mesh) // data
    shape = x.shape
    # The slices of one data shard lie next to each other in the array, those of one replica do not.
    x = x.reshape(*shape[:dim], data, replicas, shape[dim] // (data * replicas), *shape[dim + 1 :])
    x = jnp.moveaxis(x, (dim + 1, dim), (0, 1))
    x = x.reshape(replicas * data, *x.shape[2:])
    x = tree_sum(lax.all_to_all(x, BATCH_AXES, split_axis=0, concat_axis=0, tiled=True))
    if replicas > 1:
        x = lax.all_gather(x, BATCH_AXES[:-1], axis=dim, tiled=True)
    return x if _rests_on_data(param_sharding) else lax.all_gather(x, "data", axis=dim, tiled=True)


def _sum_vector(x: jax.Array, shards: int) -> jax.Array:
    if x.size < _SMALL:
        return tree_sum(lax.all_gather(x, BATCH_AXES))
    slices = jnp.pad(x.reshape(-1), (0, -x.size % shards)).reshape(shards, -1)
    total = tree_sum(lax.all_to_all(slices, BATCH_AXES, split_axis=0, concat_axis=0, tiled=True))
    return lax.all_gather(total, BATCH_AXES, tiled=True)[: x.size].reshape(x.shape)


def sum_of_squares(
    arrays: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh
) -> jax.Array:
    """The float32 sum of the squares of all elements of all arrays (in storage), in an order fixed by their shapes.

    Each array is cut into the pieces of its `grid`; a piece is summed where it lies, and their sums by one tree.
    """
    totals = squares_by_layer(arrays, param_shardings, mesh, ())
    return tree_sum(jnp.concatenate(list(totals.values())))


def squares_by_layer(
    arrays: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh, stacked: Collection[str]
) -> dict[str, jax.Array]:
    """The float32 sum of the squares of each array (in storage) alone, in an order fixed by its shape.

    Returns:
        name -> [1]; for a name in `stacked`, [layers]: one sum for each index of the first dimension.
    """

    def partial_sums(local: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: _piece_sums(x, param_shardings[name], mesh, int(name in stacked)) for name, x in local.items()}

    specs = {name: param_shardings[name].storage for name in arrays}
    sums = jax.shard_map(partial_sums, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(dict(arrays))
    replicated = NamedSharding(mesh, PartitionSpec())
    whole = {name: lax.with_sharding_constraint(x, replicated) for name, x in sums.items()}
    return {name: tree_sum(x.reshape(len(x) if name in stacked else 1, -1).T) for name, x in whole.items()}


def _piece_sums(x: jax.Array, param_sharding: ParamSharding, mesh: Mesh, kept: int) -> jax.Array:
    """The sums of squares of the pieces on this device, with as many dimensions as `x`; the first `kept` stay whole."""
    x = _square(x.astype(jnp.float32))
    for dim in range(kept, x.ndim):
        cut = math.prod(mesh.shape[axis] for axis in spec_axes(param_sharding.storage[dim]))
        x = _sum_pieces(x, dim, max(1, param_sharding.grid[dim] // cut) if param_sharding.grid else 1)
    return x


def _square(x: jax.Array) -> jax.Array:
    """The squares, from products that are exact in float32.

    Where a product feeds an addition, a compiler may contract both to a fused multiply-add, which rounds once instead
    of twice, in one program and not in another. An exact product makes no difference to either.
    """
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    low = x - high
    return high * high + (2 * high * low + low * low)


def _sum_pieces(x: jax.Array, dim: int, pieces: int) -> jax.Array:
    """Sums each of the pieces of a dimension: cuts them into `_PARTS` and adds those by a tree, again and again.

    The parts are contiguous, so that every pass streams through memory, and the second has little left to read.
    """
    axis = dim + 1
    x = x.reshape(*x.shape[:dim], pieces, x.shape[dim] // pieces, *x.shape[dim + 1 :])
    while x.shape[axis] > 1:
        size = -(-x.shape[axis] // _PARTS)
        x = jnp.pad(x, [(0, _PARTS * size - x.shape[axis] if d == axis else 0) for d in range(x.ndim)])
        total = TreeSum[jax.Array](_PARTS, operator.add)
        for i in range(_PARTS):
            total.push(lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis))
        x = total.result()
    return x.squeeze(axis)
