"""One microbatch cut over several devices: its positions, the experts of its layers, its layers.

Each device computes its part under `shard_map`; `lm_trainer.parallel.collectives` are called where parts meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.collectives import all_reduce, device_key, group_sum
from lm_trainer.parallel.mesh import BATCH_AXES, MODEL_PARALLEL_AXES, spec_axes
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.dispatch.model_parallel_limits import ROW_AXES, check_length, check_rows, model_parallel_axes

ROWS_AND_POSITIONS = PartitionSpec(ROW_AXES, "context")
"""The cut of what a microbatch has for each of its rows and positions."""


def shard_over_group(
    function: Callable[[Any, Batch, jax.Array], tuple[dict[str, jax.Array], dict[str, jax.Array]]],
    mesh: Mesh,
    param_shardings: Mapping[str, ParamSharding],
    names: Iterable[str],
) -> Callable[..., Any]:
    """`function(params, batch, key) -> (scalars, tree)`, computed by all devices that share a microbatch.

    The function is called with this device's part of the rows and of the parameters. What it returns are sums over
    that part, which are added over the devices in a fixed order.

    Args:
        function: what to compute; it comes back as it is where nothing is cut.
        mesh: of one group, or one with batch axes, over which the result then is XLA's to add.
        param_shardings: of the parameters.
        names: the parameters that the tree has.
    """
    axes, names = model_parallel_axes(mesh.shape), tuple(names)
    if not axes:
        return function
    manual, specs = manual_axes(mesh), manual_specs(param_shardings, mesh)

    def part(params: Any, batch: Batch, key_data: jax.Array) -> Any:
        scalars, tree = function(params, batch, device_key(jax.random.wrap_key_data(key_data)))
        added = sum_over_group(tree, param_shardings, mesh)
        return {name: group_sum(x) for name, x in scalars.items()}, added

    def whole(params: Any, batch: Batch, key: jax.Array) -> Any:
        rows, length = batch.tokens.shape
        shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        check_rows(rows // shards, mesh.shape)
        check_length(length, mesh.shape)
        cut: Any = ROWS_AND_POSITIONS
        mapped = jax.shard_map(
            part,
            mesh=mesh.abstract_mesh,
            in_specs=({name: specs[name] for name in params}, jax.tree.map(lambda _: cut, batch), PartitionSpec()),
            out_specs=(PartitionSpec(), {name: specs[name] for name in names}),
            axis_names=manual,
            check_vma=False,
        )
        return mapped(params, batch, jax.random.key_data(key))

    return whole


def manual_axes(mesh: Mesh) -> set[str]:
    """The axes of a group's mesh over which each device computes its part by itself."""
    # Axes with one device are manual as well: kernels that XLA cannot cut by itself then need not be.
    return {axis for axis in mesh.axis_names if axis in MODEL_PARALLEL_AXES or mesh.shape[axis] == 1}


def manual_specs(param_shardings: Mapping[str, ParamSharding], mesh: Mesh) -> dict[str, PartitionSpec]:
    """The parts of parameters that a device of a group is given."""
    manual = manual_axes(mesh)
    return {name: _only(each.compute, manual) for name, each in param_shardings.items()}


def sum_over_group(
    tree: Mapping[str, jax.Array], param_shardings: Mapping[str, ParamSharding], mesh: Mesh
) -> dict[str, jax.Array]:
    """Adds gradients over the devices of a group that have the same part of a parameter, in a fixed order.

    Args:
        tree: this device's terms, under `shard_map`.
        param_shardings: of the parameters.
        mesh: of the group.
    """
    axes, specs = model_parallel_axes(mesh.shape), manual_specs(param_shardings, mesh)
    return {
        name: all_reduce(x, _missing(specs[name], axes), _free_dim(x, param_shardings[name], mesh, axes))
        for name, x in tree.items()
    }


def _only(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    entries = (tuple(a for a in spec_axes(entry) if a in axes) for entry in spec)
    return PartitionSpec(*(e if len(e) > 1 else (e[0] if e else None) for e in entries))


def _missing(spec: PartitionSpec, axes: Iterable[str]) -> tuple[str, ...]:
    there = {a for entry in spec for a in spec_axes(entry)}
    return tuple(a for a in axes if a not in there)


def _free_dim(x: jax.Array, param_sharding: ParamSharding, mesh: Mesh, axes: Iterable[str]) -> int | None:
    """A dimension that no axis cuts, and that can be cut over all `axes` while it is summed."""
    pieces = math.prod(mesh.shape[a] for a in axes)
    cut = [bool(spec_axes(entry)) for entry in param_sharding.compute] + [False] * x.ndim
    return next((d for d, size in enumerate(x.shape) if not cut[d] and size % pieces == 0), None)
