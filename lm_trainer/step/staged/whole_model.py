"""A loss of one stage: the whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.loss.gradient import LossFn, MicrobatchFn, Sums, loss_of_params
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.model_def import ModelDef, Params


def whole_model(
    name: str,
    function: MicrobatchFn,
    model: ModelDef,
    trainable: Collection[str],
    devices: DeviceGroups,
    key: jax.Array,
) -> Callable[[Batch], list[StageFunctions]]:
    """One stage that computes a function of a microbatch.

    Args:
        name: of the stage.
        function: the sums of a microbatch.
        model: whose parameters it reads.
        trainable: those that the tree of the sums has.
        devices: that share a microbatch.
        key: folded with the step and the number of the microbatch.
    """
    key_data, divided = jax.random.key_data(key), devices.cut(function, trainable)

    # XLA names instructions after this function and its arguments, so the names are part of the program's hash, which
    # runs have recorded: by other names the program would look like another one to `lmt verify`.
    def lane(  # noqa: PLR0913 - as every gradient of a stage
        params: Params, stream: None, handed_on: Any, batch: Batch, number: None, d_stream: None, step: Any, lane: Any
    ) -> tuple[None, Sums]:
        del stream, handed_on, number, d_stream
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key_data), step), lane)
        # The leading axis is that of the batch shards once the groups' results are put together.
        return None, jax.tree.map(lambda x: x[None], Sums(*divided(params, batch, key)))

    dtypes = {name: x.dtype for name, x in model.shapes.items()}
    return lambda _: [StageFunctions(name, dtypes, gradient=lane, divided=True)]


def whole_losses(model: ModelDef, loss: LossFn, devices: DeviceGroups) -> Callable[[Batch], list[StageFunctions]]:
    """One stage for evaluation, in which nothing is differentiated, and nothing dropped."""
    losses = loss_of_params(model, loss)

    def sums(params: Params, batch: Batch, key: jax.Array) -> Sums:
        del key
        total, weight, metrics = losses(params, batch, None)
        return Sums({"loss": total, "weight": weight, **metrics}, {})

    divided = devices.cut(sums, ())

    def of_microbatch(
        params: Params, stream: None, batch: Batch, number: None, step: jax.Array, index: jax.Array
    ) -> dict[str, jax.Array]:
        del stream, number, step, index
        # The key is not used: nothing is dropped in evaluation.
        return divided(params, batch, jax.random.key(0))[0]

    dtypes = {name: x.dtype for name, x in model.shapes.items()}
    return lambda _: [StageFunctions("microbatch", dtypes, losses=of_microbatch, divided=True)]
