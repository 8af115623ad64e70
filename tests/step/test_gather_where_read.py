"""`determinism: fast` gathers a layer's parameters where the layer reads them, and stores its gradient in pieces."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.optim import AdamConfig
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, trace_module
from lm_trainer.run.build.setup import TrainingSetup, build_setup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.state.train_state import to_host

VOCAB, ROWS, SEQ, DIM, WIDE, DEVICES = 61, 8, 16, 64, 160, 8


def config(layers: int, trainer: dict[str, Any], model: dict[str, Any]) -> RunConfig:
    sizes = {
        "seq_len": SEQ,
        "hidden_dim": DIM,
        "intermediate_dim": WIDE,
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_layers": layers,
    }
    return RunConfig.model_validate(
        {
            "model": {"type": "llama", **sizes, "scan_layers": True, **model},
            "data": {"tokenizer": "bytes"},
            "trainer": {"train_batch_size": ROWS, "elastic_shards": ROWS, "determinism": "fast", **trainer},
            "optimizer": {"type": "adam", "learning_rate": 1e-2, "warmup": 0},
        }
    )


def setup(layers: int = 4, devices: int = DEVICES, *, model: Any = None, **trainer: Any) -> TrainingSetup:
    return build_setup(config(layers, trainer, model or {}), VOCAB, jax.devices()[:devices])


def batch() -> Batch:
    return random_batch(ROWS, SEQ, VOCAB)


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a compiled program, the main one under `ENTRY`."""
    by_name: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%(\S+) .*\{$", line):
            lines = by_name.setdefault("ENTRY" if head[1] else head[2], [])
        lines.append(line)
    return by_name


@pytest.mark.parametrize("remat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_are_gathered_one_by_one_inside_the_loop(remat: bool) -> None:
    layers = 5
    planned = setup(layers, model={"gradient_checkpointing": remat}, mp="p=f32,c=bfloat16")
    text = planned.step.compile(batch()).hlo()
    by_name = computations(text)
    inside = [line for body in set(re.findall(r"body=%(\S+?)[,\s]", text)) for line in by_name[body]]
    gathered = [line for line in inside if re.search(rf"\[{DIM},{WIDE}\]\S* all-gather", line)]
    assert len(gathered) == 4, "gate and up, in the forward pass and again in the backward pass"
    for name, x in planned.model.shapes.items():
        if name.startswith("blocks.") and math.prod(x.shape[1:]) > DIM:
            # Not even the stack of the gathered layers, as what a gradient needs to know.
            full_shape = ",".join(map(str, x.shape))
            assert not re.search(rf"(f32|bf16)\[{full_shape}\]", text), f"{name} is whole on a device"


@pytest.mark.slow
def test_memory_does_not_grow_by_whole_layers() -> None:
    few, many = (setup(layers) for layers in (4, 12))
    analyses = [p.step.compile(batch()).memory() for p in (few, many)]
    grown = [int(analysis.temp_size_in_bytes) for analysis in analyses if analysis is not None]
    layers = sum(4 * math.prod(x.shape) for name, x in many.model.shapes.items() if name.startswith("blocks."))
    more = layers * 8 // 12
    # The gradient's pieces, an eighth, and what enters each layer.
    assert grown[1] - grown[0] < more / 4


CASES: dict[str, Any] = {
    "loop": {"model": {"gradient_checkpointing": False}},
    "unrolled": {"model": {"scan_layers": False}},
    "groups of layers": {"model": {"gradient_checkpointing": "nested"}},
    "tied": {"model": {"tie_word_embeddings": True}},
    "accumulated": {"per_device_parallelism": 1},
    "context": {"context_axis_size": 2},
    "pipeline": {"pipeline_axis_size": 2, "per_device_parallelism": 2},
    "tensor": {"model_axis_size": 2, "tensor_parallel_axes": ["heads", "mlp"]},
    "experts": {
        "model": {"type": "mixtral", "n_routed_experts": 4},
        "expert_axis_size": 2,
        "elastic_shards": 2,
    },
    "over layers": {"parameter_axis_resources": {"layers": "data"}, "fsdp_axis": None, "devices": 2},
}


@pytest.mark.parametrize("case", ["tied", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "tied")])
def test_the_gradient_is_that_of_one_device(case: str) -> None:
    settings = dict(CASES[case])
    planned = setup(2, **{"devices": 4, **settings})
    state = planned.init()
    sums = planned.step.gradient(state, planned.step.put(batch()))
    loss = loss_function(config(2, {}, settings.get("model", {})))

    def objective(params: Any) -> Any:
        return loss(planned.model.merge(params), batch(), None)[0]

    expected, grads = jax.jit(jax.value_and_grad(objective))(to_host(state.params))
    np.testing.assert_allclose(sums.scalars["loss"], expected, rtol=1e-5)
    for name, gradient in grads.items():
        np.testing.assert_allclose(sums.tree[name], gradient, atol=1e-3, rtol=1e-3, err_msg=name)


class OwnTable(nnx.Module):
    """A model that takes its parameters straight from its variables."""

    def __init__(self) -> None:
        self.table = nnx.Param(jnp.ones((VOCAB, VOCAB + 3)), logical_axes=("vocab", "embed"))


def test_what_a_model_reads_by_itself_is_gathered_at_the_start() -> None:
    def loss(model: OwnTable, rows: Batch, key: Any) -> Any:
        del key
        return jnp.sum(jnp.square(model.table[...][rows.tokens])), jnp.float32(1.0), {}

    trainer = TrainerConfig.model_validate({"train_batch_size": ROWS, "determinism": "fast"})
    planned = plan_training(trainer, AdamConfig(), trace_module(OwnTable, jnp.float32), loss, devices=jax.devices()[:4])
    state = planned.init()
    assert not state.params["table"].is_fully_replicated
    gradient = planned.step.gradient(state, planned.step.put(batch())).tree["table"]
    counts = np.bincount(np.asarray(batch().tokens).ravel(), minlength=VOCAB)
    np.testing.assert_array_equal(gradient, np.broadcast_to(2.0 * counts[:, None], gradient.shape))
    assert re.search(rf"\[{VOCAB},{VOCAB + 3}\]\S* all-gather", planned.step.compile(batch()).hlo())
