"""Sums over devices, in an order that does not depend on the number of devices.

Floating-point addition is not associative, so `psum` and reductions of sharded arrays give different bits on different
meshes. Here every sum is a fixed binary tree of element-wise additions, which no compiler may reorder; see
`lm_trainer.parallel.tree_sum`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards, spec_axes
from lm_trainer.parallel.nodes import num_batch_nodes
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.parallel.tree_sum import Shares, TreeSum, sum_slices, tree_sum

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_SMALL = 1 << 14
"""Maximum number of elements for which one exchange of full arrays is faster than two exchanges of slices."""

_FAN_IN = 8
"""Number of elements that one pass of a sum of squares reduces to one. Needs few passes over memory and compiles
quickly."""


def sum_over_shards(
    stacked: Mapping[str, jax.Array],
    param_shardings: Mapping[str, ParamSharding],
    mesh: Mesh,
    dtypes: Mapping[str, DTypeLike] | None = None,
) -> dict[str, jax.Array]:
    """Adds the contributions of all batch shards. The sums are sharded as in storage.

    Each shard sends one slice to every other shard and adds the slices it receives in the fixed order, so the traffic
    equals a ring reduce-scatter. Arrays that have no divisible dimension are flattened, and their sums are replicated.
    Small arrays are gathered. Arrays whose `combine` is `maximum` are gathered too, and their maximum is returned.

    Args:
        stacked: name -> [shards, ...]; the first axis is sharded over the batch axes, the other axes as in `compute`.
        param_shardings: name -> sharding of the array without its first axis.
        mesh: device mesh.
        dtypes: name -> dtype of the sum; contributions in a narrower dtype are exchanged without a cast.

    Returns:
        name -> [...], which the caller's `out_shardings` must constrain to the `storage` sharding.
    """
    shards = batch_shards(mesh)
    dtypes = {name: x.dtype for name, x in stacked.items()} if dtypes is None else dtypes
    if shards == 1:
        return {name: x[0].astype(dtypes[name]) for name, x in stacked.items()}
    nodes = num_batch_nodes(mesh)

    def reduce(local: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: _sum_leaf(x[0], param_shardings[name], mesh, nodes, dtypes[name]) for name, x in local.items()}

    in_specs = {name: PartitionSpec(BATCH_AXES, *param_shardings[name].compute) for name in stacked}
    out_specs = {name: _sum_spec(param_shardings[name], mesh) for name in stacked}
    # `check_vma` is off, because JAX cannot infer that a sum of gathered terms is the same on all devices.
    return jax.shard_map(reduce, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(dict(stacked))


def sum_parts_over_shards(
    stacked: Sequence[Mapping[str, jax.Array]],
    shares: Shares,
    param_shardings: Mapping[str, ParamSharding],
    mesh: Mesh,
    dtypes: Mapping[str, DTypeLike] | None = None,
) -> dict[str, jax.Array]:
    """Same as `sum_over_shards`, for shards that have several partial sums each; the sums are replicated.

    Args:
        stacked: the first partial sums of all shards, the second ones, and so on. A shard with fewer repeats one of
            its own.
        shares: division of the terms among the shards.
        param_shardings: as for `sum_over_shards`.
        mesh: device mesh.
        dtypes: as for `sum_over_shards`.
    """
    dtypes = {name: x.dtype for name, x in stacked[0].items()} if dtypes is None else dtypes

    def reduce(local: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        return {name: combine_parts(name, [part[name][0] for part in local]) for name in local[0]}

    def combine_parts(name: str, parts: Sequence[jax.Array]) -> jax.Array:
        if param_shardings[name].combine == "maximum":
            # A shard with fewer parts repeats one of them.
            return jnp.max(lax.all_gather(jnp.stack(parts), BATCH_AXES), axis=(0, 1)).astype(dtypes[name])
        return _sum_parts(parts, shares, dtypes[name])

    specs = {name: param_shardings[name].compute for name in stacked[0]}
    in_specs = {name: PartitionSpec(BATCH_AXES, *spec) for name, spec in specs.items()}
    return jax.shard_map(reduce, mesh=mesh, in_specs=([in_specs] * len(stacked),), out_specs=specs, check_vma=False)(
        [dict(part) for part in stacked]
    )


def _sum_parts(parts: Sequence[jax.Array], shares: Shares, dtype: DTypeLike) -> jax.Array:
    shape, size = parts[0].shape, parts[0].size
    if size < _SMALL:
        return add_parts(lax.all_gather(jnp.stack(parts), BATCH_AXES).astype(dtype), shares)
    slices = [jnp.pad(x.reshape(-1), (0, -size % shares.shards)).reshape(shares.shards, -1) for x in parts]
    received = lax.all_to_all(jnp.stack(slices, axis=1), BATCH_AXES, split_axis=0, concat_axis=0, tiled=True)
    return lax.all_gather(add_parts(received.astype(dtype), shares), BATCH_AXES, tiled=True)[:size].reshape(shape)


def add_parts(parts: jax.Array, shares: Shares) -> jax.Array:
    """Returns the sum of partial sums [shards, partial sums, ...]."""
    return shares.add_partial_sums([list(of_shard) for of_shard in parts], operator.add)


def _can_scatter(sharding: ParamSharding, mesh: Mesh) -> bool:
    """Returns true if each batch shard of this mesh can add a slice of the array."""
    return sharding.scatter_dim is not None and sharding.scatter_chunks % batch_shards(mesh) == 0


def _is_stored_over_data(sharding: ParamSharding) -> bool:
    return sharding.scatter_dim is not None and "data" in spec_axes(sharding.storage[sharding.scatter_dim])


def _sum_spec(sharding: ParamSharding, mesh: Mesh) -> PartitionSpec:
    dim = sharding.scatter_dim
    if dim is None or not (_can_scatter(sharding, mesh) and _is_stored_over_data(sharding)):
        return sharding.compute
    entries = list(sharding.compute)
    entries[dim] = "data"
    return PartitionSpec(*entries)


def _sum_leaf(x: jax.Array, sharding: ParamSharding, mesh: Mesh, nodes: int, dtype: DTypeLike) -> jax.Array:
    """Sums one array over the batch shards with a reduce-scatter, and then all-gathers over the axes that replicate it.

    For example, if the dimension is 8, on 2 replicas x 2 data shards, `x` is [8, ...] and each device adds two of its
    rows:

        [8, ...] -> [data 2, replicas 2, 2, ...] -> [replicas 2, data 2, 2, ...] -> [4, 2, ...]
    """
    if sharding.combine == "maximum":
        return jnp.max(lax.all_gather(x, BATCH_AXES), axis=0).astype(dtype)
    dim = sharding.scatter_dim
    if dim is None or not _can_scatter(sharding, mesh):
        return _sum_vector(x, batch_shards(mesh), nodes, dtype)
    data = mesh.shape["data"]
    replicas = batch_shards(mesh) // data
    shape = x.shape
    # In storage, the rows of a data shard are contiguous, so `data` is the outer factor of the dimension. Devices are
    # numbered with the replica first, so the slices are reordered before they are sent.
    x = x.reshape(*shape[:dim], data, replicas, shape[dim] // (data * replicas), *shape[dim + 1 :])
    x = jnp.moveaxis(x, (dim + 1, dim), (0, 1))
    x = x.reshape(replicas * data, *x.shape[2:])
    x = _sum_own_slice(x, nodes, dtype)
    if replicas > 1:
        # The replicas of a data shard have neighbouring slices of the shard, which each replica stores in full.
        x = lax.all_gather(x, BATCH_AXES[:-1], axis=dim, tiled=True)
    return x if _is_stored_over_data(sharding) else lax.all_gather(x, "data", axis=dim, tiled=True)


def _sum_own_slice(slices: jax.Array, nodes: int, dtype: DTypeLike) -> jax.Array:
    """Sends each batch shard its slice. Returns the sum, in the order of the tree, of the slices that this shard
    receives.

    With several nodes, the exchange has two levels. Shards first exchange slices within their node and add them, one
    slice per node; then shards at the same position in their nodes exchange these partial sums. A node with n shards
    thus sends only 1/n as much over the slower network. The additions and their order are the same, because the shards
    of a node are a subtree of the sum.

    Args:
        slices: [shards, ...], by receiving shard.
        nodes: as returned by `num_batch_nodes`.
        dtype: dtype of the sum.
    """
    # The received slices are stacked by sender in the order of the batch, which is the order of the tree.
    if nodes == 1:
        return sum_slices(lax.all_to_all(slices, BATCH_AXES, 0, 0, tiled=True).astype(dtype))
    size = len(slices) // nodes
    within = [[node * size + position for position in range(size)] for node in range(nodes)]
    across = [[node * size + position for node in range(nodes)] for position in range(size)]
    by_node = slices.reshape(nodes, size, *slices.shape[1:])
    received = lax.all_to_all(by_node, BATCH_AXES, 1, 0, axis_index_groups=within)
    partial_sums = sum_slices(received.astype(dtype))
    return sum_slices(lax.all_to_all(partial_sums, BATCH_AXES, 0, 0, tiled=True, axis_index_groups=across))


def _sum_vector(x: jax.Array, shards: int, nodes: int, dtype: DTypeLike) -> jax.Array:
    """Sums an array that has no divisible dimension; all devices receive the result."""
    if x.size < _SMALL:
        return sum_slices(lax.all_gather(x, BATCH_AXES).astype(dtype))
    # Padding makes the length divisible. It does not change the order of additions, because every element is added
    # independently.
    slices = jnp.pad(x.reshape(-1), (0, -x.size % shards)).reshape(shards, -1)
    total = _sum_own_slice(slices, nodes, dtype)
    return lax.all_gather(total, BATCH_AXES, tiled=True)[: x.size].reshape(x.shape)


def sum_of_squares(
    arrays: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh
) -> jax.Array:
    """Sums the squares of all elements of all arrays in float32, in an order that depends only on their shapes.

    Each array is divided into the blocks of its `norm_grid`. Each block is summed on the device that stores it, and the
    sums of all blocks are added by one tree.
    """
    totals = squares_by_layer(arrays, param_shardings, mesh, ())
    return tree_sum(jnp.concatenate(list(totals.values())))


def squares_by_layer(
    arrays: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh, stacked: Collection[str]
) -> dict[str, jax.Array]:
    """Sums the squares of each array separately in float32, in an order that depends only on its shape.

    Returns:
        Maps each name to its sums: [layers], one per layer, for names in `stacked`; [1] for the others.
    """

    def partial_sums(local: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: _block_sums(x, param_shardings[name], mesh, int(name in stacked)) for name, x in local.items()}

    specs = {name: param_shardings[name].storage for name in arrays}
    sums = jax.shard_map(partial_sums, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(dict(arrays))
    # There are few block sums, so every device gets all of them and adds them in the same order.
    replicated = NamedSharding(mesh, PartitionSpec())
    block_sums = {name: lax.with_sharding_constraint(x, replicated) for name, x in sums.items()}
    return {name: tree_sum(x.reshape(len(x) if name in stacked else 1, -1).T) for name, x in block_sums.items()}


def _block_sums(x: jax.Array, sharding: ParamSharding, mesh: Mesh, first_dim: int) -> jax.Array:
    """Sums the squares of each block on this device, over dimensions from `first_dim` on; keeps all dimensions."""
    x = _square(x.astype(jnp.float32))
    for dim in range(first_dim, x.ndim):
        shards = math.prod(mesh.shape[axis] for axis in spec_axes(sharding.storage[dim]))
        # The grid describes the full array; this device has one of the `shards` parts along this dimension.
        x = _sum_blocks(x, dim, max(1, sharding.norm_grid[dim] // shards) if sharding.norm_grid else 1)
    return x


def _square(x: jax.Array) -> jax.Array:
    """Returns the squares as sums of products that are exact in float32.

    If a product is an operand of an addition, a compiler may contract both to a fused multiply-add, which rounds once
    instead of twice, in one program and not in another. For an exact product both give the same result.
    """
    # 12 significant bits (11 stored) and the remaining 12 bits: the product of any two halves has at most 24 bits,
    # which is as many as float32 can represent. Dekker, "A floating-point technique for extending the available
    # precision", 1971.
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    low = x - high
    return high * high + (2 * high * low + low * low)


def _sum_blocks(x: jax.Array, dim: int, blocks: int) -> jax.Array:
    """Sums each of the `blocks` of a dimension by splitting it into `_FAN_IN` parts and adding these by a tree,
    repeatedly.

    The parts are contiguous, so each pass streams through memory, and the second pass has little left to read.
    """
    axis = dim + 1
    x = x.reshape(*x.shape[:dim], blocks, x.shape[dim] // blocks, *x.shape[dim + 1 :])
    while x.shape[axis] > 1:
        size = -(-x.shape[axis] // _FAN_IN)
        # The last part is padded with zeros; adding them is exact.
        x = jnp.pad(x, [(0, _FAN_IN * size - x.shape[axis] if d == axis else 0) for d in range(x.ndim)])
        total = TreeSum[jax.Array](_FAN_IN, operator.add)
        for i in range(_FAN_IN):
            total.push(lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis))
        x = total.result()
    return x.squeeze(axis)
