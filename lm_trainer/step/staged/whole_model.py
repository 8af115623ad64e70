"""A loss with a single stage, the whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.loss.gradient import LossFn, MicrobatchFn, Sums, loss_of_params
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.model_def import ModelDef, Params


def whole_model_stages(
    name: str,
    function: MicrobatchFn,
    model: ModelDef,
    trainable: Collection[str],
    devices: DeviceGroups,
    key: jax.Array,
) -> Callable[[Batch], list[StageFunctions]]:
    """Returns a loss with a single stage that computes a function of a microbatch.

    Args:
        name: name of the stage.
        function: function that computes the sums of a microbatch.
        model: model whose parameters the function reads.
        trainable: names of the parameters in the tree of the sums.
        devices: devices that share a microbatch.
        key: random key, into which step and microbatch index are folded.
    """
    key_data, divided = jax.random.key_data(key), devices.shard_function(function, trainable)

    # XLA names instructions after this function and its arguments, so these names are part of the program hash that
    # runs record. Renaming them would make `lmt verify` report a different program.
    def lane(  # noqa: PLR0913 - the signature of every stage gradient
        params: Params,
        stream: None,
        handed_on: PyTree,
        batch: Batch,
        number: None,
        d_stream: None,
        step: jax.Array,
        lane: jax.Array,
    ) -> tuple[None, Sums]:
        del stream, handed_on, number, d_stream
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key_data), step), lane)
        # Leading axis, along which the results of the batch shards are stacked.
        return None, jax.tree.map(lambda x: x[None], Sums(*divided(params, batch, key)))

    dtypes = {name: x.dtype for name, x in model.shapes.items()}
    return lambda _: [StageFunctions(name, dtypes, gradient=lane, divided=True)]


def whole_model_losses(model: ModelDef, loss: LossFn, devices: DeviceGroups) -> Callable[[Batch], list[StageFunctions]]:
    """Returns a loss with a single stage for evaluation, without derivatives and dropout."""
    losses = loss_of_params(model, loss)

    def sums(params: Params, batch: Batch, key: jax.Array) -> Sums:
        del key
        total, weight, metrics = losses(params, batch, None)
        return Sums({"loss": total, "weight": weight, **metrics}, {})

    divided = devices.shard_function(sums, ())

    def of_microbatch(
        params: Params, stream: None, batch: Batch, number: None, step: jax.Array, index: jax.Array
    ) -> dict[str, jax.Array]:
        del stream, number, step, index
        # The key is unused, because evaluation has no dropout.
        return divided(params, batch, jax.random.key(0))[0]

    dtypes = {name: x.dtype for name, x in model.shapes.items()}
    return lambda _: [StageFunctions("microbatch", dtypes, losses=of_microbatch, divided=True)]
