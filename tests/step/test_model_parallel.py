"""A microbatch that several devices share: the losses and gradients of one device, up to the order of additions."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.spec import BlockSpec
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, trace_module
from lm_trainer.run.build.setup import TrainingSetup, build_setup, plan_training
from lm_trainer.run.build.startup_notes import configuration_warnings, determinism_note
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.state.train_state import to_host
from tests.step.test_layerwise import PrefixedLlama

VOCAB, ROWS, SEQ = 61, 4, 32
SIZES = {"seq_len": SEQ, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "scan_layers": True}
GPT2 = {"type": "gpt2", **SIZES, "resid_pdrop": 0.0, "embed_pdrop": 0.0, "gradient_checkpointing": False}
LLAMA = {"type": "llama", **SIZES, "num_kv_heads": 1, "intermediate_dim": 32, "gradient_checkpointing": False}
MISTRAL = {**LLAMA, "type": "mistral", "sliding_window": 9}
LATENT: dict[str, Any] = {
    "type": "minicpm3", **SIZES, "intermediate_dim": 48, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "gradient_checkpointing": False,
}  # fmt: skip
RING = {"attn_backend": "ring", "flash_attention_block_size": 2}
MIXTRAL = {**LLAMA, "type": "mixtral", "lbl_coef": 0.05, "rzl_coef": 0.01, "n_routed_experts": 4}
ONE_MICROBATCH: dict[str, Any] = {"elastic_shards": 1, "train_batch_size": ROWS}


def expert_spec(block: BlockSpec) -> MoeSpec:
    assert isinstance(block.mlp, MoeSpec)
    return block.mlp


def setup(model: dict[str, Any], devices: int, *, optimizer: str = "adam", **trainer: Any) -> TrainingSetup:
    """A model with `dense: false` computes its experts in groups, which a CPU otherwise does not."""
    config = RunConfig.model_validate(
        {
            "model": {key: value for key, value in model.items() if key not in ("kernel", "prefix")},
            "data": {"tokenizer": "bytes"},
            "trainer": {**ONE_MICROBATCH, **trainer},
            "optimizer": {"type": optimizer, "learning_rate": 1e-2, "warmup": 0},
        }
    )
    if "prefix" in model:
        config = config.model_copy(update={"model": PrefixedLlama(**config.model.model_dump())})
    if "kernel" not in model:
        return build_setup(config, VOCAB, jax.devices()[:devices])
    spec = config.model.spec(VOCAB)
    blocks = tuple(replace(block, mlp=replace(expert_spec(block), kernel=model["kernel"])) for block in spec.blocks)
    grouped = trace_module(lambda: Decoder(replace(spec, blocks=blocks), rngs=nnx.Rngs(0)), np.float32)
    return plan_training(
        config.trainer, config.optimizer, grouped, loss_function(config), devices=jax.devices()[:devices]
    )


def packed(rows: int) -> Batch:
    """Three documents in each row, of which some tokens count for nothing, and padding."""
    batch = random_batch(rows, SEQ, VOCAB)
    tokens, targets, weights, positions, segments = (np.array(x) for x in jax.tree.leaves(batch))
    for document, start in enumerate((13, 20), start=1):
        segments[:, start:], positions[:, start:] = document, np.arange(SEQ - start)
    weights[:, 12], weights[1], weights[3, 25:], segments[3, 25:] = 0.0, 0.5, 0.0, -1
    return Batch(tokens, targets, weights, positions, segments)


def gradient(planned: TrainingSetup) -> tuple[Sums, Any]:
    """The sums over one batch, with weights that every mesh is given alike; and the memory of the executable."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0.0, 0.2, x.shape).astype(x.dtype) for n, x in sorted(planned.model.shapes.items())}
    batch = packed(ROWS)
    executable = planned.step.compile(batch)
    sums = planned.step.gradient(planned.from_weights(weights), planned.step.put(batch))
    return Sums({n: x.item() for n, x in sums.scalars.items()}, to_host(sums.tree)), executable.memory()  # pyright: ignore[reportArgumentType]


def on_one_device(model: dict[str, Any], precision: str = "f32") -> tuple[Sums, Any]:
    """As `gradient`, with the scores of whole rows, whatever the model does on several devices."""
    return _with_whole_rows(tuple((key, value) for key, value in model.items() if key not in RING), precision)


@cache
def _with_whole_rows(model: tuple[tuple[str, Any], ...], precision: str) -> tuple[Sums, Any]:
    return gradient(setup(dict(model), 1, mp=precision))


def assert_close(model: dict[str, Any], sizes: dict[str, int], **trainer: Any) -> tuple[Any, Any]:
    """The memory of the cut executable, and of that of one device."""
    devices = int(np.prod(list(sizes.values())))
    keys = {f"{axis}_axis_size": size for axis, size in sizes.items()}
    tensor = {"tensor_parallel_axes": ["heads", "mlp"]} if "model" in sizes else {}
    sums, memory = gradient(setup(model, devices, **keys, **tensor, **trainer))
    expected, one = on_one_device(model, trainer.get("mp", "f32"))
    # bfloat16 rounds by up to 2^-8, and sums of another order differ by several of these.
    tolerance = 1e-5 if "mp" not in trainer else 3e-2
    assert sums.scalars == pytest.approx(expected.scalars, rel=tolerance)
    for name, value in expected.tree.items():
        scale = float(np.abs(value).max())
        # By the largest element: those near 0 are what is left of sums that cancel.
        np.testing.assert_allclose(sums.tree[name], value, atol=tolerance * (scale + 1e-2), err_msg=name)
    return memory, one


@pytest.mark.slow
@pytest.mark.optimised
def test_positions_cut_over_devices_take_less_memory_and_compute_the_same() -> None:
    # A window of its own: the reference of the other tests is compiled without XLA's optimisations.
    memory, one = assert_close({**MISTRAL, "sliding_window": 8}, {"context": 4})
    assert memory.temp_size_in_bytes < 0.4 * one.temp_size_in_bytes


@pytest.mark.slow
def test_experts_cut_over_devices_compute_the_same() -> None:
    planned = setup(MIXTRAL, 2, expert_axis_size=2)
    assert planned.sharding.params["blocks.0.mlp.gate"].compute[1] == "expert"
    memory, one = assert_close(MIXTRAL, {"expert": 2})
    assert memory.argument_size_in_bytes < 0.75 * one.argument_size_in_bytes


@pytest.mark.slow
def test_layers_cut_over_devices_compute_the_same() -> None:
    assert_close(GPT2, {"pipeline": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "trainer"),
    [
        (GPT2, {"model": 2}, {}),
        (LLAMA, {"context": 2, "model": 2}, {}),
        (LLAMA, {"context": 2}, {"mp": "p=f32,c=bfloat16"}),
        (MIXTRAL, {"expert": 2, "context": 2}, {}),
        (MIXTRAL | {"kernel": "ragged_dot"}, {"expert": 2}, {}),
        (MIXTRAL, {"expert": 2, "model": 2}, {}),
        (GPT2 | {"num_layers": 4, "gradient_checkpointing": True}, {"pipeline": 4}, {}),
        (GPT2, {"pipeline": 2, "context": 2}, {}),
        (GPT2 | {"scan_layers": False}, {"pipeline": 2, "model": 2}, {}),
        ({"type": "mpt", **SIZES, "gradient_checkpointing": False}, {"context": 2}, {}),
        ({"type": "mpt", **SIZES, "gradient_checkpointing": False, **RING}, {"context": 4}, {}),
        (MISTRAL | RING, {"context": 8}, {}),
        (LLAMA | RING | {"gradient_checkpointing": True}, {"context": 2, "model": 2}, {}),
        (LLAMA | RING, {"context": 2}, {"mp": "p=f32,c=bfloat16"}),
        (MIXTRAL | RING, {"expert": 2, "context": 2}, {}),
        (GPT2 | RING, {"pipeline": 2, "context": 2}, {}),
        (MISTRAL | RING, {"context": 1}, {}),
        (LATENT, {"context": 2, "model": 2}, {}),
        (LATENT | RING, {"context": 2}, {}),
    ],
    ids=lambda value: "-".join(map(str, value.get("type", value) if isinstance(value, dict) else value)),
)
def test_pairs_of_axes_and_what_models_have(model: dict[str, Any], sizes: dict[str, int], trainer: Any) -> None:
    assert_close(model, sizes, **trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axis"),
    [
        pytest.param(LLAMA, "context", id="context", marks=pytest.mark.optimised),
        pytest.param(GPT2, "model", id="tensor", marks=pytest.mark.optimised),
        pytest.param(LLAMA | RING, "context", id="ring"),
        pytest.param(MIXTRAL, "expert", id="expert"),
        pytest.param(GPT2, "pipeline", id="pipeline"),
    ],
)
def test_bits_do_not_depend_on_the_axes_of_the_batch(model: dict[str, Any], axis: str) -> None:
    def bits(devices: int) -> list[bytes]:
        sizes: dict[str, Any] = {"train_batch_size": 2 * ROWS, "elastic_shards": 4, f"{axis}_axis_size": 2}
        if axis == "model":
            sizes["tensor_parallel_axes"] = ["mlp", "heads"]
        planned = setup(model, devices, **sizes)
        batch = packed(2 * ROWS)
        planned.step.compile(batch)
        state, results = planned.init(), []
        for _ in range(3):
            state, metrics = planned.step(state, planned.step.put(batch), 1e-2)
            results += [np.asarray(x).tobytes() for x in (metrics["loss"], metrics["grad_norm"])]
        held_out = planned.evaluate(state.params, [batch])["loss"]
        return [*results, np.float64(held_out).tobytes(), *(x.tobytes() for x in to_host(state.params).values())]

    assert bits(2) == bits(4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axis"),
    [(LLAMA, "context"), (LLAMA | RING, "context"), (MIXTRAL, "expert"), (GPT2, "pipeline")],
    ids=["context", "ring", "expert", "pipeline"],
)
def test_one_program_for_all_devices_can_be_cut_as_well(model: dict[str, Any], axis: str) -> None:
    sizes: dict[str, Any] = {f"{axis}_axis_size": 2}
    planned = setup(model, 4, determinism="fast", elastic_shards=2, **sizes)
    batch = packed(ROWS)
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0.0, 0.2, x.shape).astype(x.dtype) for n, x in sorted(planned.model.shapes.items())}
    sums = planned.step.gradient(planned.from_weights(weights), planned.step.put(batch))
    expected = on_one_device(model)[0]
    # Router penalties are of microbatches, of which there are two here.
    assert sums.scalars["loss"].item() == pytest.approx(expected.scalars["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "trainer", "message"),
    [
        (GPT2, {"expert_axis_size": 2}, "expert_axis_size needs a model with experts, such as mixtral"),
        (MIXTRAL, {"pipeline_axis_size": 2}, "pipeline_axis_size cannot cut a model with experts"),
        (
            GPT2 | {"num_layers": 3},
            {"pipeline_axis_size": 2},
            "3 layers cannot be cut into pipeline_axis_size=2 equal stages",
        ),
        ({**LLAMA, "prefix": 1}, {"pipeline_axis_size": 2}, r"first layers differ from the others \(1 of 2\)"),
        (
            GPT2,
            {"pipeline_axis_size": 2, "train_batch_size": 3},
            "microbatch of 3 rows.*per_device_parallelism to a mul",
        ),
        (GPT2, {"context_axis_size": 3}, "rows of 32 positions cannot be cut into context_axis_size=3 pieces"),
        (
            GPT2,
            {"context_axis_size": 2, "optimizer": "sophia-h"},
            "optimizer estimates curvature from random",
        ),
        (MIXTRAL, {"expert_axis_size": 8, "train_batch_size": 8}, "axis 'experts' of size 4.*expert_axis_size=8"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_what_cannot_be_cut_is_refused(model: dict[str, Any], trainer: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ValidationError), match=message):
        setup(model, 8, **trainer)


@pytest.mark.parametrize(
    ("trainer", "pattern"),
    [
        ({}, None),
        ({"determinism": "fast"}, "bits are equal only for the same devices"),
        (
            {"model_axis_size": 2, "tensor_parallel_axes": ["mlp"]},
            "with tensor parallelism, several devices add.*microbatch: bits.*for model_axis_size=2 and any sizes",
        ),
        (
            {"context_axis_size": 2},
            "with shared positions.*dropout of their own.*equal for context_axis_size=2 and any sizes of replica",
        ),
        ({"model_axis_size": 2}, "model_axis_size=2 cuts no computation.*name.*tensor_parallel_axes"),
        ({"pipeline_axis_size": 2, "context_axis_size": 2}, "equal for context_axis_size=2, pipeline_axis_size=2 and"),
    ],
    ids=str,
)
def test_what_is_promised_instead(trainer: dict[str, Any], pattern: str | None) -> None:
    config = RunConfig.model_validate({"model": GPT2, "trainer": {**ONE_MICROBATCH, **trainer}}).trainer
    text = determinism_note(config, config.step_plan.mesh(jax.devices()))
    assert (text is None) if pattern is None else re.search(pattern, text or "")


@pytest.mark.parametrize(
    ("devices", "trainer", "patterns"),
    [
        (4, {}, []),
        (7, {"determinism": "fast", "train_batch_size": 7, "per_device_parallelism": 1}, ["determinism: fast"]),
        (7, {}, ["7 devices .* share 8 microbatches unevenly: some compute 2, others 1, .* 43% of", "whole on each"]),
        (6, {"train_batch_size": 24, "per_device_parallelism": 1}, ["cut in 2 parts, with 3 copies of each"]),
        (4, {"train_batch_size": 6, "per_device_parallelism": 1}, ["some compute 2, others 1", "cut in 2 parts"]),
        (4, {"replica_ici_axis_size": 2}, []),
    ],
)
def test_the_price_of_a_number_of_devices_is_said(devices: int, trainer: dict[str, Any], patterns: list[str]) -> None:
    settings = {"train_batch_size": 8, "elastic_shards": 8, **trainer}
    config = RunConfig.model_validate({"model": GPT2, "trainer": settings}).trainer
    warnings = list(configuration_warnings(config, config.step_plan.mesh(jax.devices()[:devices])))
    assert len(warnings) == len(patterns)
    assert all(re.search(pattern, text) for pattern, text in zip(patterns, warnings, strict=True))


@pytest.mark.parametrize(
    ("mp", "message"),
    [
        ("p=f32,c=bfloat16", None),
        ("f32", None),
        ("bfloat16", "p=f32,c=bfloat16 keeps them in float32"),
        ("p=f32,c=f16", "no loss is scaled"),
    ],
)
def test_precisions_that_lose_numbers_are_named(mp: str, message: str | None) -> None:
    config = RunConfig.model_validate({"model": GPT2, "trainer": {**ONE_MICROBATCH, "mp": mp}}).trainer
    warnings = list(configuration_warnings(config, config.step_plan.mesh(jax.devices()[:1])))
    assert (warnings == []) if message is None else message in warnings[0]
