"""One microbatch sharded over several devices: its positions, the experts of its layers, or its layers.

Each device computes its part under `shard_map`, and communicates with `lm_trainer.parallel.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.collectives import all_max, all_reduce, device_key, group_sum
from lm_trainer.parallel.mesh import BATCH_AXES, MODEL_PARALLEL_AXES, spec_axes
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.dispatch.model_parallel_limits import ROW_AXES, check_length, check_rows, model_parallel_axes
from lm_trainer.step.state.model_def import Params

ROWS_AND_POSITIONS = PartitionSpec(ROW_AXES, "context")
"""Partition spec of arrays whose leading dimensions are the rows and positions of a microbatch."""


def shard_over_group(
    function: Callable[[PyTree, Batch, jax.Array], tuple[dict[str, jax.Array], dict[str, jax.Array]]],
    mesh: Mesh,
    param_shardings: Mapping[str, ParamSharding],
    names: Iterable[str],
) -> Callable[..., PyTree]:
    """Distributes `function(params, batch, key) -> (scalars, tree)` over all devices that share a microbatch.

    The function is called with this device's part of the rows and of the parameters. It returns sums over its part,
    which are added over the devices in a fixed order.

    Args:
        function: function to distribute. It is returned unchanged if the mesh has no model-parallel axes.
        mesh: mesh of one group. It may have batch axes; XLA then adds the results over them.
        param_shardings: shardings of the parameters.
        names: names of the parameters in the tree.
    """
    axes, names = model_parallel_axes(mesh.shape), tuple(names)
    if not axes:
        return function
    manual, specs = manual_axes(mesh), manual_specs(param_shardings, mesh)

    def part(params: Params, batch: Batch, key_data: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        scalars, tree = function(params, batch, device_key(jax.random.wrap_key_data(key_data)))
        added = sum_over_group(tree, param_shardings, mesh)
        return {name: group_sum(x) for name, x in scalars.items()}, added

    def run_sharded(params: Params, batch: Batch, key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        rows, length = batch.tokens.shape
        shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        check_rows(rows // shards, mesh.shape)
        check_length(length, mesh.shape)
        rows_spec = jax.tree.map(lambda _: ROWS_AND_POSITIONS, batch)
        mapped = jax.shard_map(
            part,
            mesh=mesh.abstract_mesh,
            in_specs=({name: specs[name] for name in params}, rows_spec, PartitionSpec()),
            out_specs=(PartitionSpec(), {name: specs[name] for name in names}),
            axis_names=manual,
            check_vma=False,
        )
        return mapped(params, batch, jax.random.key_data(key))

    return run_sharded


def manual_axes(mesh: Mesh) -> set[str]:
    """Returns the axes of a group's mesh that are manual under `shard_map`."""
    # Axes with one device are manual too, so that kernels that XLA cannot partition need not be partitioned.
    return {axis for axis in mesh.axis_names if axis in MODEL_PARALLEL_AXES or mesh.shape[axis] == 1}


def manual_specs(param_shardings: Mapping[str, ParamSharding], mesh: Mesh) -> dict[str, PartitionSpec]:
    """Returns the partition specs, over the manual axes, of the parameters of a group."""
    manual = manual_axes(mesh)
    return {name: _restrict_to_axes(sharding.compute, manual) for name, sharding in param_shardings.items()}


def sum_over_group(
    tree: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh
) -> dict[str, jax.Array]:
    """Adds gradients over the devices of a group that have the same part of a parameter, in a fixed order, or takes
    their maximum.

    Args:
        tree: the terms of this device, under `shard_map`.
        param_shardings: shardings of the parameters.
        mesh: mesh of the group.
    """
    axes, specs = model_parallel_axes(mesh.shape), manual_specs(param_shardings, mesh)

    def combine(name: str, x: jax.Array) -> jax.Array:
        unused = _unused_axes(specs[name], axes)
        if param_shardings[name].combine == "maximum":
            return all_max(x, unused)
        return all_reduce(x, unused, _find_unsharded_dim(x, param_shardings[name], mesh, axes))

    return {name: combine(name, x) for name, x in tree.items()}


def _restrict_to_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    entries = (tuple(a for a in spec_axes(entry) if a in axes) for entry in spec)
    return PartitionSpec(*(e if len(e) > 1 else (e[0] if e else None) for e in entries))


def _unused_axes(spec: PartitionSpec, axes: Iterable[str]) -> tuple[str, ...]:
    used = {a for entry in spec for a in spec_axes(entry)}
    return tuple(a for a in axes if a not in used)


def _find_unsharded_dim(x: jax.Array, param_sharding: ParamSharding, mesh: Mesh, axes: Iterable[str]) -> int | None:
    """Finds an unsharded dimension whose size is divisible by the number of devices along all `axes`; else None."""
    pieces = math.prod(mesh.shape[a] for a in axes)
    sharded = [bool(spec_axes(entry)) for entry in param_sharding.compute] + [False] * x.ndim
    return next((d for d, size in enumerate(x.shape) if not sharded[d] and size % pieces == 0), None)
