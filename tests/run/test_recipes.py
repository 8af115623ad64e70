"""Recipes of real sizes in configs: their heads are true, their plans fit, and scaled-down copies of them train."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.models.hf import config_from_hf
from lm_trainer.models.hf_section import compare_with_hf_config
from lm_trainer.profile.flops import parameter_count
from tests.conftest import ROOT, Lmt, RunLmt, refused
from tests.run.test_configs import load_config

RECIPES = (
    "gpt2_124m",
    "llama_1b",
    "llama_8b",
    "moonlight_16b",
    "olmo2_7b",
    "olmo3_7b",
    "olmoe_7b",
    "qwen3_30b_a3b_continued",
    "qwen3_continued",
    "smollm2_chat",
    "tinystories",
)
HEADINGS = ("For", "Devices", "Tokens", "Time and price", "Should reach", "Tried here")
SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
SHAPE = {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "seq_len": 64, "cross_entropy_block_size": 64}
ROTARY = {"intermediate_dim": 128, "num_kv_heads": 2}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2}
OWN_SHAPE: dict[str, dict[str, Any]] = {
    "moonlight_16b": {
        **{"intermediate_dim": 128, "moe_intermediate_dim": 48, "kv_lora_rank": 32, **EXPERTS},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
    "olmo3_7b": {"sliding_window": 32, "num_layers": 4},
    "olmoe_7b": EXPERTS,
    "qwen3_30b_a3b_continued": {"head_dim": 16, "moe_intermediate_dim": 48, **EXPERTS},
    "qwen3_continued": {"head_dim": 16},
}
"""Sizes of scaled-down copies that only some families have."""
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def test_the_list_is_complete() -> None:
    files = (ROOT / "configs").glob("*.yaml")
    assert sorted(RECIPES) == sorted(p.stem for p in files if not re.search("_nano$|^ladder_", p.stem))


def head(name: str) -> dict[str, str]:
    """The entries of the comment at the top of a recipe."""
    lines = (ROOT / f"configs/{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line[1:] for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]]
    text = "\n".join(line if re.match(r" [A-Z][\w ]+: ", line) else f" {line.strip()}" for line in comment)
    entries = re.split(rf"^ ({'|'.join(HEADINGS)}): ", text, flags=re.MULTILINE)
    return {
        "": entries[0],
        **{key: " ".join(value.split()) for key, value in zip(entries[1::2], entries[2::2], strict=True)},
    }


def number(text: str) -> float:
    """A number such as `8.03 billion` at the beginning of a text."""
    match = re.match(r"([\d.,]+)(?: (thousand|million|billion|trillion))?", text)
    assert match is not None, text
    return float(match[1].replace(",", "")) * SCALES.get(match[2], 1.0)


def plan_command(name: str) -> list[str]:
    match = re.search(r"`lmt (plan [^`]*)`", head(name)["Devices"])
    assert match is not None
    return shlex.split(match[1])


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_is_true(name: str) -> None:
    entries, config = head(name), load_config(ROOT / f"configs/{name}.yaml")
    assert list(entries) == ["", *HEADINGS]
    vocabulary = int(plan_command(name)[plan_command(name).index("--vocab-size") + 1])
    match = re.search(r"([\d.]+ (?:million|billion)) parameters", entries["For"])
    assert match is not None
    assert parameter_count(config.model.spec(vocabulary)) == pytest.approx(number(match[1]), rel=0.01)
    tokens = config.trainer.batch_schedule.at(0) * config.model.seq_len * config.trainer.num_train_steps
    assert tokens == pytest.approx(number(entries["Tokens"]), rel=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_found_by_name_and_passes_the_check(lmt: Lmt, name: str) -> None:
    result = lmt("config", "check", name, "--no-files")
    assert result.returncode == 0, result.stderr
    assert f"configs/{name}.yaml: ok" in result.stdout


SIZES_OF_OTHERS = {"llama_1b": "llama_8b", "olmo2_7b": "olmo3_7b", "qwen3_30b_a3b_continued": "olmoe_7b"}
"""Recipes whose model and step are another's in other sizes."""
LONG_PLANS = {"moonlight_16b"}
"""Recipes whose plan takes several minutes."""


def marks(exhaustive: bool) -> pytest.MarkDecorator:
    return pytest.mark.exhaustive if exhaustive else pytest.mark.slow


PLANNED = [pytest.param(name, marks=marks(name in SIZES_OF_OTHERS or name in LONG_PLANS)) for name in RECIPES]
TRAINED = [pytest.param(name, marks=marks(name in SIZES_OF_OTHERS)) for name in RECIPES]


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_fits_and_is_the_one_in_the_head(run_lmt: RunLmt, in_tmp_path: Path, name: str) -> None:
    result = run_lmt(*plan_command(name), "--json", timeout=600, cwd=in_tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    peak = max(phase["bytes"] for phase in plan["memory"]["phases"]) / 2**30
    match = re.search(r"(\d+(?:\.\d+)?) GiB of (\d+(?:\.\d+)?)", head(name)["Devices"])
    assert match is not None
    # XLA's plan for a CPU changes a little with its version.
    assert peak == pytest.approx(float(match[1]), rel=0.1)
    assert peak < float(match[2])
    if "device hours" in (written := head(name)["Time and price"]):
        for unit, planned in (("device hours", plan["time"]["device_hours"]), ("dollars", plan["time"]["cost"])):
            match = re.search(rf"([\d,.]+) {unit}", written)
            assert match is not None
            assert planned == pytest.approx(number(match[1]), rel=0.02), unit


def scaled_down(name: str, directory: Path) -> list[Any]:
    """Overrides for a copy of a recipe that trains in seconds, from text on this machine."""
    config = load_config(ROOT / f"configs/{name}.yaml")
    has_heads = "num_kv_heads" in type(config.model).model_fields
    shape = {**SHAPE, **(ROTARY if has_heads else {}), **OWN_SHAPE.get(name, {}), "initializer_range": 0.125}
    text = directory / "text.jsonl"
    messages = [{"role": "user", "content": "count to nine"}, {"role": "assistant", "content": "one two three four"}]
    row = {"text": "one two three four five six seven eight nine. " * 4, "messages": messages}
    text.write_text(f"{json.dumps(row)}\n" * 400)
    template = directory / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    chat = [f"data.format.chat_template={template}"] if name == "smollm2_chat" else []
    hub = ["initialize_from_hf=false"] if config.initialize_from_hf else []
    exports = ["hf_save_path=null"] if config.hf_save_path else []
    return [
        *(f"model.{key}={value}" for key, value in shape.items()),
        f"data.train_urls=[{text}]",
        f"data.validation_urls=[{text}]",
        "data.num_validation_sequences=null",
        "data.tokenizer=bytes",
        *chat,
        *hub,
        *exports,
        "trainer.id=small",
        "trainer.train_batch_size=16",
        "trainer.elastic_shards=8",
        "trainer.num_train_steps=12",
        "trainer.steps_per_eval=12",
        "trainer.max_eval_batches=1",
        "trainer.sample_tokens=0",
        "trainer.token_probabilities=0",
        "trainer.tracker=[]",
        "trainer.checkpointer.keep=[]",
        "optimizer.warmup=2",
        "optimizer.learning_rate=1e-2",
    ]


@pytest.mark.parametrize("name", TRAINED)
def test_a_scaled_down_copy_trains(lmt: Lmt, in_tmp_path: Path, name: str) -> None:
    result = lmt("train", name, *scaled_down(name, in_tmp_path), "trainer.max_devices=2")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (in_tmp_path / "logs/small/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] - 1, losses


def test_too_many_devices_for_a_recipe(run_lmt: RunLmt, in_tmp_path: Path) -> None:
    """The error says how many devices the batch of a recipe can use."""
    result = run_lmt("plan", "llama_8b", "--devices", "1024xH100", "--vocab-size", "128256", cwd=in_tmp_path)
    refused(result, "at most 512 devices")


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_continued": {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "head_dim": 128},
        **{"intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "max_position_embeddings": 32768, "hidden_act": "silu"},
        **{"tie_word_embeddings": True, "vocab_size": 151936, "initializer_range": 0.02, "attention_bias": False},
    },
    "moonlight_16b": {
        **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 2048},
        **{"intermediate_size": 11264, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "moe_layer_freq": 1},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
        **{"routed_scaling_factor": 2.446, "norm_topk_prob": True, "scoring_func": "sigmoid"},
        **{"topk_method": "noaux_tc", "aux_loss_alpha": 0.001, "seq_aux": True, "hidden_act": "silu"},
        **{"rms_norm_eps": 1e-5, "rope_theta": 50_000, "max_position_embeddings": 8192, "vocab_size": 163840},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False},
    },
    "qwen3_30b_a3b_continued": {
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "head_dim": 128},
        **{"intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "hidden_act": "silu"},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "max_position_embeddings": 32768, "vocab_size": 151936},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False},
    },
    "smollm2_chat": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "hidden_act": "silu"},
        **{"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
        **{"rms_norm_eps": 1e-5, "rope_theta": 100_000, "max_position_embeddings": 8192, "vocab_size": 49152},
        **{"tie_word_embeddings": True, "initializer_range": 0.041666666666666664, "attention_bias": False},
    },
    "olmo2_7b": {
        **{"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "hidden_act": "silu"},
        **{"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"rms_norm_eps": 1e-6, "rope_theta": 500_000, "max_position_embeddings": 4096, "vocab_size": 100352},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False},
    },
    "olmoe_7b": {
        **{"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 2048, "hidden_act": "silu"},
        **{"intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10_000, "max_position_embeddings": 4096, "vocab_size": 50304},
        **{"tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False, "clip_qkv": None},
        # The published 0.01 is of a loss that is divided by the experts of a token.
        **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01 / 8},
    },
}
"""Fields of config.json of the models on the hub."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_is_the_published_one(name: str) -> None:
    section = load_config(ROOT / f"configs/{name}.yaml").model
    vocabulary = PUBLISHED[name]["vocab_size"]
    published = config_from_hf(PUBLISHED[name])[0]
    assert compare_with_hf_config(section, frozenset(), published, vocabulary) == []
