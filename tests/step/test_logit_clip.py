"""QK-Clip: the largest logits of a batch, and the weights of heads whose logits exceed the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.run.build.model import next_token_loss
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host
from tests.step.test_load import ROWS, SEQ, after_steps, packed, setup

LIMIT = 19.0
"""Between the largest logits of different heads of all models."""
SIZES = {"seq_len": SEQ, "hidden_dim": 16, "num_layers": 3, "num_heads": 2, "initializer_range": 0.6,
         "gradient_checkpointing": False}  # fmt: skip
PLAIN = {"type": "gpt2", **SIZES}
GROUPED = {"type": "llama", **SIZES, "num_heads": 4, "num_kv_heads": 2, "intermediate_dim": 24}
LATENT = {"type": "deepseek_v3", **SIZES, "intermediate_dim": 24, "kv_lora_rank": 6, "q_lora_rank": 10,
          "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
          "moe_intermediate_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
          }  # fmt: skip
DIRECT = {**LATENT, "q_lora_rank": None}
LARGEST, CLIPPED = "qk_largest_logit", "qk_clipped_heads"
Arrays = dict[str, np.ndarray]


def clipping(model: dict[str, Any], devices: int = 1, limit: float | None = LIMIT, **trainer: Any) -> TrainingSetup:
    return setup(model, devices, {"type": "muon", "qk_clip": limit}, **trainer)


def one_step(planned: TrainingSetup, rate: float = 0.0, steps: int = 1) -> tuple[Arrays, Arrays, dict[str, float]]:
    """The weights before and after steps at a learning rate, and the metrics of the last step."""
    planned.step.compile(packed())
    state, metrics = planned.init(), {}
    before = to_host(state.params)
    for _ in range(steps):
        state, metrics = planned.step(state, planned.step.put(packed()), rate)
    return before, to_host(state.params), {name: float(x) for name, x in metrics.items()}


def normalise(x: np.ndarray, params: Mapping[str, np.ndarray]) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params["bias"]


def gpt2_logits(params: Mapping[str, np.ndarray]) -> np.ndarray:
    """The largest logit of each head of each layer, [layers, heads], by the equations of GPT-2 in float64."""
    batch, params = packed(), {name: x.astype(np.float64) for name, x in params.items()}
    x = params["embed.tokens"][batch.tokens] + params["embed.positions"][batch.positions]
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    allowed = same & np.tri(SEQ, dtype=bool) & (batch.segments >= 0)[:, :, None]
    largest = []
    for layer in range(3):
        block = {n.removeprefix("blocks.0."): w[layer] for n, w in params.items() if n.startswith("blocks.0.")}

        def part(name: str, block: Mapping[str, np.ndarray] = block) -> dict[str, np.ndarray]:
            return {n.rpartition(".")[2]: w for n, w in block.items() if n.rpartition(".")[0] == name}

        h = normalise(x, part("attention_pre_norm"))
        q, k, v = (
            np.einsum("bsd,dnh->bnsh", h, block[f"attention.{n}.weight"]) + block[f"attention.{n}.bias"][:, None]
            for n in "qkv"
        )
        scores = np.where(allowed[:, None], q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -np.inf)
        largest.append(scores.max(axis=(0, 2, 3)))
        safe = np.where(allowed.any(-1)[:, None, :, None], scores, 0.0)
        e = np.exp(safe - safe.max(-1, keepdims=True))
        o = np.einsum("bnsh,nhd->bsd", e / e.sum(-1, keepdims=True) @ v, block["attention.out.weight"])
        x = x + o + block["attention.out.bias"]
        h = normalise(x, part("mlp_pre_norm")) @ block["mlp.up.weight"] + block["mlp.up.bias"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ block["mlp.down.weight"] + block["mlp.down.bias"]
    return np.array(largest)


def test_largest_logits_and_clipped_weights_equal_the_numpy_twin() -> None:
    """The paper: heads with S_max > tau get W_q <- sqrt(tau / S_max) W_q, and W_k likewise."""
    before, after, metrics = one_step(clipping(PLAIN))
    largest = gpt2_logits(before)
    assert 0 < (largest > LIMIT).sum() < largest.size, largest
    np.testing.assert_allclose(after["blocks.0.attention.largest_logits"], largest, rtol=1e-4)
    assert metrics[LARGEST] == pytest.approx(largest.max(), rel=1e-4)
    assert metrics[CLIPPED] == (largest > LIMIT).sum()
    factor = np.sqrt(np.minimum(1.0, LIMIT / largest))
    for name, x in before.items():
        if name.endswith(("q.weight", "k.weight")):
            np.testing.assert_allclose(after[name], x * factor[:, None, :, None], rtol=1e-4, err_msg=name)
        elif name.endswith(("q.bias", "k.bias")):
            np.testing.assert_allclose(after[name], x * factor[..., None], rtol=1e-4, err_msg=name)
        elif not name.endswith("largest_logits"):
            np.testing.assert_array_equal(after[name], x, err_msg=name)


def scaled_parts(before: Arrays, after: Arrays, layer: int, largest: np.ndarray, name: str) -> np.ndarray:
    """The power of the factor by which each dimension of each head was multiplied, [heads, size]; NaN if unclipped."""
    old, new = (x[name][layer].reshape(-1, *x[name].shape[-2:]) for x in (before, after))
    ratio = np.einsum("dnh,dnh->nh", old, new) / np.einsum("dnh,dnh->nh", old, old)
    np.testing.assert_allclose(new, old * ratio, rtol=1e-5)
    logs = np.log(np.minimum(1.0, LIMIT / largest[layer]))[:, None]
    return np.where(logs < 0, np.log(ratio) / np.where(logs < 0, logs, 1.0), np.nan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "powers"),
    [
        (GROUPED, {"q.weight": [1.0] * 4}),
        (LATENT, {"q_up.weight": [0.5] * 6 + [1.0] * 4, "kv_up.weight": [0.5] * 6 + [0.0] * 8}),
        (DIRECT, {"q.weight": [0.5] * 6 + [1.0] * 4, "kv_up.weight": [0.5] * 6 + [0.0] * 8}),
    ],
    ids=["grouped", "latent", "latent-direct"],
)
def test_the_parts_of_a_head_that_the_paper_names_are_scaled(model: dict[str, Any], powers: dict[str, Any]) -> None:
    """The logits of the first layer, whose input does not change, are at the limit afterwards."""
    limits = clipping(model)
    before, after, metrics = one_step(limits)
    names = [name for name in after if name.endswith("largest_logits")]
    assert sum((after[name] > LIMIT).sum() for name in names) == metrics[CLIPPED] > 0
    weights = {f"blocks.{name.split('.')[1]}.attention.{part}": name for name in names for part in powers}
    for name, x in before.items():
        if name not in {*weights, *names} and name not in limits.model.loads:
            np.testing.assert_array_equal(after[name], x, err_msg=name)
    for weight, name in weights.items():
        for layer in range(len(after[name])):
            found = scaled_parts(before, after, layer, after[name], weight)
            expected = np.broadcast_to(powers[weight.split("attention.")[1]], found.shape)
            np.testing.assert_allclose(found, np.where(np.isnan(found), np.nan, expected), atol=1e-3, err_msg=weight)
    again = one_step(limits, steps=2)[1]
    first = names[0]
    expected = np.minimum(after[first][0], LIMIT)
    assert (after[first][0] > LIMIT).any()
    np.testing.assert_allclose(again[first][0], expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "trainer"),
    [
        (PLAIN, 2, {}),
        (PLAIN, 4, {"gather": "layer"}),
        (GROUPED, 3, {"mp": "p=f32,c=bfloat16"}),
        (LATENT, 4, {}),
        (LATENT, 2, {"gather": "layer"}),
        (PLAIN, 8, {"microbatches_per_gather": 1}),
    ],
    ids=["plain-2", "plain-4-layers", "grouped-3-bf16", "latent-4", "latent-2-layers", "plain-8-gathers"],
)
def test_bits_do_not_depend_on_the_number_of_devices(model: dict[str, Any], devices: int, trainer: Any) -> None:
    alone = after_steps(clipping(model, **trainer))
    assert np.frombuffer(alone[CLIPPED], np.float32) > 0
    assert after_steps(clipping(model, devices, **trainer)) == alone


@pytest.mark.slow
def test_an_unreached_limit_changes_nothing() -> None:
    """Up to the rounding of another program."""
    (_, plain, _), (_, limited, metrics) = (one_step(clipping(GROUPED, limit=limit), 1e-2) for limit in (None, 1e6))
    assert metrics[CLIPPED] == 0
    for name, x in plain.items():
        np.testing.assert_allclose(limited[name], x, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context_axis_size": 2}, {"model_axis_size": 2}], ids=str)
def test_devices_that_share_a_microbatch_measure_it_together(sizes: dict[str, int]) -> None:
    trainer = {"elastic_shards": 2, "per_device_parallelism": ROWS // 2}
    expected, actual = (one_step(clipping(PLAIN, n, **trainer, **axes)) for n, axes in ((1, {}), (2, sizes)))
    name = "blocks.0.attention.largest_logits"
    np.testing.assert_allclose(actual[1][name], expected[1][name], rtol=1e-4)
    assert actual[2][CLIPPED] == expected[2][CLIPPED]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [-1, 2], ids=["at once", "accumulated"])
def test_one_program_for_the_whole_mesh_clips_the_same(rows: int) -> None:
    expected = one_step(clipping(PLAIN))
    actual = one_step(clipping(PLAIN, 2, determinism="fast", per_device_parallelism=rows))
    for name, x in expected[1].items():
        np.testing.assert_allclose(actual[1][name], x, rtol=1e-4, atol=1e-6, err_msg=name)
    assert actual[2][CLIPPED] == expected[2][CLIPPED]


@pytest.mark.slow
def test_blocks_of_queries_give_the_same_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one_step(clipping(GROUPED))[1]
    monkeypatch.setattr("lm_trainer.nn.largest_logits._BLOCK", 5)
    blocks = one_step(clipping(GROUPED))[1]
    for name, x in whole.items():
        if name.endswith("largest_logits"):
            np.testing.assert_allclose(blocks[name], x, rtol=1e-6)


@pytest.mark.slow
def test_a_step_that_is_not_finite_scales_no_weight() -> None:
    planned = clipping(PLAIN)
    planned.step.compile(packed())
    state = planned.init()
    state.params["head.weight" if "head.weight" in state.params else "final_norm.scale"] *= np.float32("nan")
    before = to_host(state.params)
    state, _ = planned.step(state, planned.step.put(packed()), 1e-2)
    for name, x in to_host(state.params).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)


REFUSED = {
    "normalizes queries and keys": {"model": {"type": "qwen3"}},
    "queries and keys": {"model": {"type": "mpt", "clip_qkv": 4.0}},
    "no attention with a softmax": {"model": {"type": "mamba2"}},
    "cross-attention": {"model": {"type": "whisper"}},
    "ring": {"model": {"type": "gpt2", "attn_backend": "ring"}},
    "pipeline_axis_size": {"model": {"type": "gpt2"}, "trainer": {"pipeline_axis_size": 2}},
    "next_token": {
        "loss": {"type": "dpo"},
        "trainer": {"initialize_from": "base"},
        "data": {"format": {"type": "preference"}},
    },
}


@pytest.mark.parametrize(("reason", "sections"), REFUSED.items(), ids=REFUSED)
def test_what_has_no_clip_is_refused_by_name(reason: str, sections: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"optimizer.qk_clip.*{reason}"):
        RunConfig.model_validate({**sections, "optimizer": {"type": "muon", "qk_clip": 100}})


def test_a_model_without_measurements_is_refused() -> None:
    planned = clipping(PLAIN)
    model = dataclasses.replace(planned.model, logit_clips={})
    config = RunConfig.model_validate({"optimizer": {"type": "muon", "qk_clip": 100}})
    with pytest.raises(UserError, match="qk_clip needs a model"):
        plan_training(config.trainer, config.optimizer, model, next_token_loss("float32"))
