"""A loss of one's own in stages: the numbers of the whole, and the bits of any mesh, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.nn.log import log
from lm_trainer.nn.stages import MemoryStack, StagedLoss, Stream
from lm_trainer.optim import AdamConfig
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.executable import Executables
from lm_trainer.step.state.model_def import ModelDef
from lm_trainer.step.state.train_state import to_host

LAYERS, DIM, VOCAB, SEQ = 3, 8, 11, 4


class Layers(nnx.Module):
    """The weights of all layers, stacked."""

    def __init__(self) -> None:
        weights = jax.random.normal(jax.random.key(1), (LAYERS, DIM, DIM))
        self.weight = nnx.Param(weights, logical_axes=("layers", "embed", None))


class Mixer(nnx.Module):
    """A table of tokens that is the head as well, and layers between the two."""

    def __init__(self) -> None:
        self.table = nnx.Param(jax.random.normal(jax.random.key(0), (VOCAB, DIM)), logical_axes=("vocab", "embed"))
        self.layers = Layers()


def embed(model: Mixer, batch: Batch, key: jax.Array | None) -> Stream:
    return Stream(model.table[...][batch.tokens])


def layer(model: Mixer, slot: int, stream: Stream, batch: Batch, number: jax.Array, key: jax.Array | None) -> Stream:
    x_BSD = stream.x_BSD
    update_BSD = jnp.tanh(x_BSD @ model.layers.weight[...])
    log("size", jnp.mean(jnp.square(update_BSD)), each=True)
    if key is not None:
        update_BSD *= jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, update_BSD.shape)
    return Stream(x_BSD + update_BSD)


def head(model: Mixer, stream: Stream, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Any]:
    logits_BSV = stream.x_BSD @ model.table[...].T
    nll_BS = -jnp.take_along_axis(jax.nn.log_softmax(logits_BSV), batch.targets[..., None], -1)[..., 0]
    return jnp.sum(nll_BS * batch.weights), jnp.sum(batch.weights), {"spread": jnp.sum(jnp.square(nll_BS))}


LOSS = StagedLoss(LAYERS, ("layers.",), embed, layer, head)


class Reader(Mixer):
    """Layers that read what other layers, which run first, have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layers()


def embed_targets(model: Reader, batch: Batch, key: jax.Array | None) -> Stream:
    return Stream(model.table[...][batch.targets])


def first_layer(
    model: Reader, slot: int, stream: Stream, batch: Batch, number: jax.Array, key: jax.Array | None
) -> Stream:
    update_BSD = jnp.tanh(stream.x_BSD @ model.first.weight[...])
    log("first", jnp.mean(jnp.square(update_BSD)) + number, each=True)
    return Stream(stream.x_BSD + update_BSD)


def finish(model: Reader, stream: Stream, batch: Batch, key: jax.Array | None) -> jax.Array:
    log("between", jnp.max(stream.x_BSD))
    return jnp.mean(stream.x_BSD * model.table[...][None, :1], axis=1, keepdims=True)


def reading_layer(
    model: Reader, slot: int, stream: Stream, batch: Batch, number: jax.Array, key: jax.Array | None
) -> Stream:
    return layer(model, slot, Stream(stream.x_BSD + stream.memory), batch, number, key)


MEMORY = MemoryStack(LAYERS, ("first.",), embed_targets, first_layer, finish, name="reader")
READING = StagedLoss(LAYERS, ("layers.",), embed, reading_layer, head, memory=MEMORY)
BATCH = random_batch(8, SEQ, VOCAB)


def setup(
    devices: int, loss: StagedLoss = LOSS, is_trainable: Callable[[str], bool] = lambda _: True, **trainer: Any
) -> TrainingSetup:
    settings = TrainerConfig.model_validate({"train_batch_size": 8, "num_train_steps": 4, **trainer})
    model = ModelDef.trace(Mixer if loss is LOSS else Reader, is_trainable)
    return plan_training(settings, AdamConfig(), model, loss, devices=jax.devices()[:devices], seq_len=SEQ)


def gradient(devices: int, *args: Any, **trainer: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    planned = setup(devices, *args, **trainer)
    planned.step.compile(BATCH)
    sums = planned.step.gradient(planned.init(), planned.step.put(BATCH))
    return {name: float(x) for name, x in sums.scalars.items()}, to_host(sums.tree)


def test_stages_compute_what_the_whole_computes() -> None:
    """With the dropout, the logged values and both gradients of the table."""
    unstaged, staged = gradient(1), gradient(1, determinism="layerwise")
    assert {"loss", "weight", "spread", "size", "size/2"} <= unstaged[0].keys()
    assert staged[0] == pytest.approx(unstaged[0], rel=1e-5)
    for name, x in unstaged[1].items():
        np.testing.assert_allclose(staged[1][name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    scalars, grads = gradient(2, determinism="layerwise", microbatches_per_gather=1)
    assert scalars == staged[0]
    jax.tree.map(np.testing.assert_array_equal, grads, staged[1])


def test_layers_that_run_first_are_stages_too() -> None:
    """With a table that three stages read, logged values of all layers, and dropout."""
    unstaged, staged = gradient(1, READING), gradient(1, READING, gather="layer")
    assert {"first", "first/2", "between", "size", "size/2"} <= unstaged[0].keys()
    assert staged[0] == pytest.approx(unstaged[0], rel=1e-5)
    for name, x in unstaged[1].items():
        np.testing.assert_allclose(staged[1][name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    scalars, grads = gradient(2, READING, gather="layer", microbatches_per_gather=1)
    assert scalars == staged[0]
    jax.tree.map(np.testing.assert_array_equal, grads, staged[1])


def test_frozen_layers_that_run_first_have_no_backward_pass() -> None:
    planned = setup(1, READING, lambda name: name.startswith("layers."), gather="layer")
    programs = planned.step.compile(BATCH)
    assert isinstance(programs, Executables)
    assert [name for name in programs.by_name if name.endswith(" gradient")] == ["layer 0 gradient", "leave gradient"]
    state = planned.init()
    assert np.isfinite(planned.step.gradient(state, planned.step.put(BATCH)).scalars["loss"])


def test_microbatches_of_a_whole_model_are_added_up_in_groups_with_the_same_bits() -> None:
    ungrouped = gradient(1)
    for devices in (1, 2):
        scalars, grads = gradient(devices, microbatches_per_gather=1)
        assert scalars == ungrouped[0]
        jax.tree.map(np.testing.assert_array_equal, grads, ungrouped[1])


def test_a_device_is_given_the_parameters_of_one_layer() -> None:
    programs = setup(1, determinism="layerwise").step.compile(BATCH)
    assert isinstance(programs, Executables)
    params = jax.tree.leaves(programs.by_name["layer 0"].compiled.args_info[0][0])
    assert [x.shape for x in params] == [(DIM, DIM)]
    assert programs.times["layer 0"] == LAYERS


def test_held_out_losses_of_stages_are_those_of_the_whole() -> None:
    means = [
        planned.evaluate(planned.init().params, [BATCH]) for planned in (setup(1), setup(1, determinism="layerwise"))
    ]
    assert means[1] == pytest.approx(means[0], rel=1e-5)
