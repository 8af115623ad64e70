"""The stages of a loss cut over the devices of a group, which share the rows and positions of a microbatch.

A device has router statistics and logged values of its own. Those of a stream have an axis over the devices here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.nn.stages import Stream
from lm_trainer.parallel.collectives import group_sum
from lm_trainer.step.dispatch.model_parallel import ROWS_AND_POSITIONS, manual_axes, manual_specs, sum_over_group
from lm_trainer.step.dispatch.model_parallel_limits import check_length, check_rows, model_parallel_axes
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.stage import Stage


def share_stage(
    function: Callable[..., Any], stage: Stage, mesh: Mesh, others: Sequence[Any], returns: Any
) -> Callable[..., Any]:
    """`function(params, *others)` of a stage, computed by all devices of a group.

    The function is called with this device's part of the rows, the stream and the parameters. Sums that it returns are
    added over the devices in a fixed order.

    Args:
        function: what to compute; it comes back as it is where nothing is cut.
        stage: whose parameters it reads.
        mesh: of the group.
        others: the shapes of its other arguments.
        returns: "stream", "sums" or "scalars" for each of its results, in a structure like theirs; "nothing" for None
            and what only a device alone returns.

    Raises:
        UserError: where the devices cannot share the rows.
    """
    if not model_parallel_axes(mesh.shape):
        return function
    for each in others:
        if isinstance(each, Batch):
            rows, length = each.tokens.shape
            check_rows(rows, mesh.shape)
            check_length(length, mesh.shape)
    specs, stream = manual_specs(stage.layouts, mesh), _stream_specs(mesh)
    sums = Sums(PartitionSpec(), {name: PartitionSpec(None, *specs[name]) for name in stage.trained})  # pyright: ignore[reportArgumentType]
    kinds = {"stream": stream, "sums": sums, "scalars": PartitionSpec(), "nothing": PartitionSpec()}

    def of_device(params: Any, *others: Any) -> Any:
        given = (_without_device(each) if isinstance(each, Stream) else each for each in others)
        results = function(params, *given)
        return jax.tree.map(lambda kind, result: _result(kind, result, stage, mesh), returns, results)

    return jax.shard_map(
        of_device,
        mesh=mesh.abstract_mesh,
        in_specs=(specs, *(_argument_specs(each, mesh) for each in others)),
        out_specs=jax.tree.map(lambda kind: kinds[kind], returns),
        axis_names=manual_axes(mesh),
        check_vma=False,
    )


def put_on_group(others: Sequence[Any], mesh: Mesh) -> tuple[Any, ...]:
    """The shapes of arguments as for `share_stage`, with their shardings; batches are whole on each device."""
    shardings = stream_on_group(mesh)

    def placed(each: Any) -> Any:
        if isinstance(each, Stream) and isinstance(shardings, Stream):
            return jax.tree.map(_place, shardings, each)
        return _place(NamedSharding(mesh, PartitionSpec()), each)

    return tuple(map(placed, others))


def stream_on_group(mesh: Mesh) -> Any:
    """The shardings of a stream on a group, where nothing is cut one for all of it."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), _stream_specs(mesh))


def _place(sharding: NamedSharding, shapes: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def _stream_specs(mesh: Mesh) -> Any:
    axes = model_parallel_axes(mesh.shape)
    own = PartitionSpec(axes)
    return Stream(ROWS_AND_POSITIONS, own, own) if axes else PartitionSpec()  # pyright: ignore[reportArgumentType]


def _argument_specs(argument: Any, mesh: Mesh) -> Any:
    if isinstance(argument, Stream):
        return _stream_specs(mesh)
    return ROWS_AND_POSITIONS if isinstance(argument, Batch) else PartitionSpec()


def _result(kind: str, result: Any, stage: Stage, mesh: Mesh) -> Any:
    match kind:
        case "stream":
            return result._replace(**jax.tree.map(lambda x: x[None], _own(result)))
        case "sums":
            # Without the axis in front, that over groups, while they are added.
            tree = sum_over_group({name: x[0] for name, x in result.tree.items()}, stage.layouts, mesh)
            return Sums(_added(result.scalars), {name: x[None] for name, x in tree.items()})
        case "nothing":
            return result
        case _:
            return _added(result)


def _added(scalars: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: group_sum(x) for name, x in scalars.items()}


def _without_device(stream: Stream) -> Stream:
    return stream._replace(**jax.tree.map(lambda x: x[0], _own(stream)))


def _own(stream: Stream) -> dict[str, Any]:
    return {"stats": stream.stats, "logged": stream.logged}
