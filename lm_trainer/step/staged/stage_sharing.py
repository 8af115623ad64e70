"""Stages of a loss that are sharded over the devices of a group, which share the rows and positions of a microbatch.

Router statistics and logged values differ between devices. In a stream they therefore have an axis over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.stages import Stream
from lm_trainer.parallel.collectives import group_sum
from lm_trainer.step.dispatch.model_parallel import ROWS_AND_POSITIONS, manual_axes, manual_specs, sum_over_group
from lm_trainer.step.dispatch.model_parallel_limits import check_length, check_rows, model_parallel_axes
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.stage import Stage, StageFunction


def share_stage(
    function: StageFunction, stage: Stage, mesh: Mesh, others: Sequence[PyTree], returns: PyTree
) -> Callable[..., PyTree]:
    """Distributes `function(params, *others)` of a stage over all devices of a group.

    The function is called with this device's part of the rows, the stream and the parameters. Sums that it returns are
    added over the devices in a fixed order.

    Args:
        function: function to distribute. It is returned unchanged if the group has no model-parallel axes.
        stage: stage that the function belongs to.
        mesh: mesh of the group.
        others: shapes of the other arguments.
        returns: "stream", "sums" or "scalars" for each result, in the same structure as the results; "nothing" for None
            and for values that the function returns only without model parallelism.

    Raises:
        UserError: if the devices cannot share the rows.
    """
    assert function.call is not None
    call = function.call
    if not model_parallel_axes(mesh.shape):
        return call
    for argument in others:
        if isinstance(argument, Batch):
            rows, length = argument.tokens.shape
            check_rows(rows, mesh.shape)
            check_length(length, mesh.shape)
    specs, stream = manual_specs(stage.layouts, mesh), _stream_specs(mesh)
    read = manual_specs(function.params.layouts, mesh)
    sums = Sums(PartitionSpec(), {name: PartitionSpec(None, *specs[name]) for name in stage.trained})  # pyright: ignore[reportArgumentType]
    kinds = {"stream": stream, "sums": sums, "scalars": PartitionSpec(), "nothing": PartitionSpec()}

    def of_device(params: PyTree, *others: PyTree) -> PyTree:
        arguments = (_remove_device_axis(x) if isinstance(x, Stream) else x for x in others)
        results = call(params, *arguments)
        return jax.tree.map(lambda kind, result: _reduce_result(kind, result, stage, mesh), returns, results)

    return jax.shard_map(
        of_device,
        mesh=mesh.abstract_mesh,
        in_specs=(read, *(_argument_specs(argument, mesh) for argument in others)),
        out_specs=jax.tree.map(lambda kind: kinds[kind], returns),
        axis_names=manual_axes(mesh),
        check_vma=False,
    )


def with_group_shardings(others: Sequence[PyTree], mesh: Mesh) -> tuple[PyTree, ...]:
    """Adds shardings to the shapes of arguments as in `share_stage`; batches are replicated within the group."""
    shardings = stream_shardings(mesh)

    def with_shardings(argument: PyTree) -> PyTree:
        if isinstance(argument, Stream) and isinstance(shardings, Stream):
            return jax.tree.map(_with_sharding, shardings, argument)
        return _with_sharding(NamedSharding(mesh, PartitionSpec()), argument)

    return tuple(map(with_shardings, others))


def stream_shardings(mesh: Mesh) -> PyTree:
    """Returns the shardings of a stream on a group; a single sharding without model parallelism."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), _stream_specs(mesh))


def _with_sharding(sharding: Sharding, shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def _stream_specs(mesh: Mesh) -> Stream | PartitionSpec:
    axes = model_parallel_axes(mesh.shape)
    per_device = PartitionSpec(axes)
    return Stream(ROWS_AND_POSITIONS, per_device, per_device) if axes else PartitionSpec()  # pyright: ignore[reportArgumentType]


def _argument_specs(argument: PyTree, mesh: Mesh) -> Stream | PartitionSpec:
    if isinstance(argument, Stream):
        return _stream_specs(mesh)
    return ROWS_AND_POSITIONS if isinstance(argument, Batch) else PartitionSpec()


def _reduce_result(kind: str, result: PyTree, stage: Stage, mesh: Mesh) -> PyTree:
    match kind:
        case "stream":
            return result._replace(**jax.tree.map(lambda x: x[None], _per_device_values(result)))
        case "sums":
            # The leading axis, over groups, is removed for the addition.
            tree = sum_over_group({name: x[0] for name, x in result.tree.items()}, stage.layouts, mesh)
            return Sums(_sum_scalars(result.scalars), {name: x[None] for name, x in tree.items()})
        case "nothing":
            return result
        case _:
            return _sum_scalars(result)


def _sum_scalars(scalars: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: group_sum(x) for name, x in scalars.items()}


def _remove_device_axis(stream: Stream) -> Stream:
    return stream._replace(**jax.tree.map(lambda x: x[0], _per_device_values(stream)))


def _per_device_values(stream: Stream) -> dict[str, PyTree]:
    return {"stats": stream.stats, "logged": stream.logged}
