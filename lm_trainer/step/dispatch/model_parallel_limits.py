"""Limits of model parallelism: which models, rows and lengths the axes of a group can shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from lm_trainer.core.errors import UserError
from lm_trainer.nn.mixer_spec import state_arrays
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES

ROW_AXES = ("pipeline", "expert")
"""Axes of a group that, outside the layers they parallelise, shard only the rows of a microbatch."""


def model_parallel_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes that shard a microbatch on a mesh with these axis sizes."""
    return tuple(axis for axis in MODEL_PARALLEL_AXES if sizes[axis] > 1)


def check_length(length: int, sizes: Mapping[str, int]) -> None:
    """Raises UserError if rows of `length` positions cannot be sharded over the context axis."""
    if length % sizes["context"]:
        raise UserError(
            f"rows of {length} positions cannot be cut into context_axis_size={sizes['context']} pieces; choose a "
            f"divisor of model.seq_len"
        )


def check_rows(rows: int, sizes: Mapping[str, int]) -> None:
    """Raises UserError if the `rows` of a microbatch cannot be sharded over the row axes."""
    cuts = {f"{axis}_axis_size": sizes[axis] for axis in ROW_AXES if sizes[axis] > 1}
    if rows % math.prod(cuts.values()):
        raise UserError(
            f"a microbatch of {rows} rows cannot be shared by "
            f"{' x '.join(f'{key}={size}' for key, size in cuts.items())} devices; set "
            f"trainer.per_device_parallelism to a multiple of {math.prod(cuts.values())}"
        )


def check_model_parallel(spec: DecoderSpec | None, rows: Iterable[int], sizes: Mapping[str, int]) -> None:
    """Checks that the axes of a group can shard a model and the rows of its microbatches; raises as `check_model`.

    Args:
        spec: spec of the model; None for a model that is not a `Decoder`.
        rows: the numbers of rows of the microbatches.
        sizes: sizes of the mesh axes.
    """
    check_model(spec, sizes)
    for count in rows:
        check_rows(count, sizes)


def check_model(spec: DecoderSpec | None, sizes: Mapping[str, int]) -> None:
    """Checks that the axes of a group can shard a model.

    Args:
        spec: spec of the model; None for a model that is not a `Decoder`.
        sizes: sizes of the mesh axes.

    Raises:
        UserError: if an axis cannot shard the model. The message names the axis and the reason.
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
    if "context" in axes and any(state_arrays(block.mixer) for block in spec.blocks):
        raise UserError(
            "context_axis_size cannot cut a model whose layers pass a state from position to position; set it to 1, "
            "and cut its weights by model_axis_size or its batch by the data axis instead"
        )
    if "expert" in axes and not spec.num_routers:
        raise UserError("expert_axis_size needs a model with experts, such as mixtral; set it to 1")
    if "pipeline" not in axes:
        return
    if spec.multi_token is not None:
        raise UserError(
            "pipeline_axis_size cannot cut a model that predicts later tokens, because the last stage alone has what "
            "they are predicted from; set it to 1, or model.mtp_depth to 0"
        )
    if spec.layer_embedding is not None:
        raise UserError(
            "pipeline_axis_size cannot cut a model whose layers have token embeddings of their own, because the first "
            "stage alone has what they read; set it to 1, or model.layer_embedding_dim to null"
        )
    if spec.num_routers:
        raise UserError(
            "pipeline_axis_size cannot cut a model with experts, because what its routers count is of whole "
            "microbatches; set it to 1, and expert_axis_size instead"
        )
    stages, layers = sizes["pipeline"], len(spec.blocks)
    if spec.prefix:
        raise UserError(
            f"pipeline_axis_size cannot cut this model into equal stages, because its first layers differ from the "
            f"others ({spec.prefix} of {layers}); set it to 1"
        )
    period = spec.sections[0].period
    if layers % (period * stages):
        pattern = f", which repeat every {period} layers," if period > 1 else ""
        raise UserError(
            f"{layers} layers{pattern} cannot be cut into pipeline_axis_size={stages} equal stages; choose a "
            f"divisor of {layers // period}"
        )
