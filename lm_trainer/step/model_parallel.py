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
from lm_trainer.core.errors import UserError
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.parallel.collectives import all_reduce, device_key, group_sum
from lm_trainer.parallel.mesh import BATCH_AXES, MODEL_PARALLEL_AXES, spec_axes
from lm_trainer.parallel.sharding import ParamSharding

ROW_AXES = ("pipeline", "expert")
"""The axes of a group that the rows of a microbatch are cut over where nothing else of it is."""


ROWS_AND_POSITIONS = PartitionSpec(ROW_AXES, "context")
"""The cut of what a microbatch has for each of its rows and positions."""


def model_parallel_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that cut a microbatch on a mesh of these sizes."""
    return tuple(axis for axis in MODEL_PARALLEL_AXES if sizes[axis] > 1)


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


def check_length(length: int, sizes: Mapping[str, int]) -> None:
    """Raises UserError when rows of `length` positions cannot be cut over the context axis."""
    if length % sizes["context"]:
        raise UserError(
            f"rows of {length} positions cannot be cut into context_axis_size={sizes['context']} pieces; choose a "
            f"divisor of model.seq_len"
        )


def check_rows(rows: int, sizes: Mapping[str, int]) -> None:
    """Raises UserError when the `rows` of a microbatch cannot be shared by the axes that cut rows."""
    cuts = {f"{axis}_axis_size": sizes[axis] for axis in ROW_AXES if sizes[axis] > 1}
    if rows % math.prod(cuts.values()):
        raise UserError(
            f"a microbatch of {rows} rows cannot be shared by "
            f"{' x '.join(f'{key}={size}' for key, size in cuts.items())} devices; set "
            f"trainer.per_device_parallelism to a multiple of {math.prod(cuts.values())}"
        )


def check_model_parallel(spec: DecoderSpec | None, rows: Iterable[int], sizes: Mapping[str, int]) -> None:
    """Finds what the axes of a group cannot do with a model or with the rows of a microbatch; raises as `check_model`.

    Args:
        spec: of the model; None for one that is no `Decoder`.
        rows: of the microbatches that there are.
        sizes: of the axes of the mesh.
    """
    check_model(spec, sizes)
    for count in rows:
        check_rows(count, sizes)


def check_model(spec: DecoderSpec | None, sizes: Mapping[str, int]) -> None:
    """Finds what the axes of a group cannot do with a model.

    Args:
        spec: of the model; None for one that is no `Decoder`.
        sizes: of the axes of the mesh.

    Raises:
        UserError: names the axis and what hinders it.
    """
    axes = model_parallel_axes(sizes)
    if not axes:
        return
    if spec is None:
        raise UserError(f"{axes[0]}_axis_size needs a decoder of lm_trainer, not a model of your own; set it to 1")
    if spec.encoder is not None and (wrong := [axis for axis in axes if axis in ("context", "pipeline")]):
        raise UserError(
            f"{wrong[0]}_axis_size cannot cut a model with an encoder, to all of whose positions every layer attends; "
            f"set it to 1, and cut its weights by model_axis_size or its batch by the data axis instead"
        )
    if "expert" in axes and not spec.num_routers:
        raise UserError("expert_axis_size needs a model with experts, such as mixtral; set it to 1")
    if "pipeline" not in axes:
        return
    if spec.num_routers:
        raise UserError(
            "pipeline_axis_size cannot cut a model with experts, because what its routers count is of whole "
            "microbatches; set it to 1, and expert_axis_size instead"
        )
    stages, layers = sizes["pipeline"], len(spec.blocks)
    if layers % (spec.period * stages):
        pattern = f", which repeat every {spec.period} layers," if spec.period > 1 else ""
        raise UserError(
            f"{layers} layers{pattern} cannot be cut into pipeline_axis_size={stages} equal stages; choose a "
            f"divisor of {layers // spec.period}"
        )
