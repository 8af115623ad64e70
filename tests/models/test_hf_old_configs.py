"""config.json files of old or unusual spelling against what transformers computes from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.export.huggingface import read_hf_config
from lm_trainer.models import hf
from tests.models.common import change
from tests.models.test_hf_families import LLAMA3, LONG, YARN, build, our_logits, read

GONE = object()
"""A key that the file lacks."""

OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD_LLAMA3 = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta",)}
OLD_LONG = {"type": "longrope", "short_factor": LONG["short_factor"], "long_factor": LONG["long_factor"]}


def without(block: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in keys}


OLD_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"hidden_act": "gelu"}),
    ("gemma", {"hidden_act": GONE}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", {"hidden_activation": GONE, "hidden_act": "relu"}),
    ("gemma3", {"hidden_activation": "gelu"}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_act": "gelu_new"}),
    ("llama", {"hidden_act": "gelu_fast"}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"hidden_act": "swish"}),
    ("gpt_neox", {"hidden_act": "gelu_fast"}),
    ("gpt_neox", {"hidden_act": GONE}),
    ("gpt_neox", {"rope_parameters": GONE, "rotary_pct": 1.0, "rope_theta": 100.0, "rotary_emb_base": 500.0}),
    ("gpt_neox", {"rope_parameters": GONE, "rotary_pct": 1.0, "rope_theta": 100.0}),
    ("llama", {"rope_parameters": GONE, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}),
    ("llama", {"rope_parameters": GONE, "rope_scaling": OLD_LLAMA3, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": GONE, "rope_scaling": OLD_YARN}),
    ("llama", {"rope_parameters": without(YARN, "original_max_position_embeddings")}),
    ("llama", {"rope_parameters": without(LLAMA3, "original_max_position_embeddings")}),
    ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
    ("llama", {"rope_parameters": {**LONG, "original_max_position_embeddings": 32}}),
    ("llama", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    ("llama", {"rms_norm_eps": GONE, "rope_parameters": GONE, "tie_word_embeddings": GONE}),
    ("mistral", {"sliding_window": GONE, "rms_norm_eps": GONE}),
    ("qwen2", {"use_sliding_window": GONE, "layer_types": GONE}),
    ("olmo2", {"rms_norm_eps": GONE, "rope_parameters": GONE}),
    ("phi3", {"rope_parameters": GONE, "rope_scaling": OLD_LONG, "original_max_position_embeddings": 32}),
    ("phi3", {"rope_parameters": {**LONG, "original_max_position_embeddings": 16},
              "original_max_position_embeddings": 32}),
    ("phi3", {"rms_norm_eps": GONE, "sliding_window": GONE}),
]  # fmt: skip
"""A family, and the edits of a config.json that transformers 5 wrote."""


def edited(directory: Path, out: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(directory, out)
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8")) | changes
    config = {key: value for key, value in raw.items() if value is not GONE}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def torch_logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float().eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize(("name", "changes"), OLD_CONFIGS)
def test_an_old_file_computes_what_transformers_computes(
    make_hf_model: Any, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    directory = edited(build(make_hf_model, name), tmp_path / "old", changes)
    raw, tensors = read(directory)
    ids = np.load(directory / "reference.npz")["input_ids"]
    actual = our_logits(*hf.config_from_hf(raw), tensors, ids)
    assert np.abs(actual - torch_logits(directory, ids)).max() <= 1e-4


def test_a_gate_that_transformers_reads_otherwise_is_not_written(make_hf_model: Any) -> None:
    raw, _ = read(build(make_hf_model, "gemma"))
    config, vocab_size = hf.config_from_hf(raw)
    with pytest.raises(UserError, match="takes hidden_act: gelu of a gemma model for its tanh approximation"):
        hf.config_to_hf(change(config, activation_function="gelu"), vocab_size=vocab_size, eos_id=2, bos_id=1)


@pytest.mark.slow
def test_longrope_takes_the_table_of_the_models_seq_len(make_hf_model: Any) -> None:
    directory = build(make_hf_model, "phi3", rope_parameters=LONG, original_max_position_embeddings=32)
    raw, tensors = read(directory)
    config, vocab_size = hf.config_from_hf(raw)
    ids = np.load(directory / "reference.npz")["input_ids"]
    for seq_len, length in {32: 32, 64: 48}.items():
        actual = our_logits(change(config, seq_len=seq_len), vocab_size, tensors, ids[:, :length])
        assert np.abs(actual - torch_logits(directory, ids[:, :length])).max() <= 1e-4, seq_len
    # On the other side transformers takes the other table, which is said.
    other = our_logits(config, vocab_size, tensors, ids[:, :32])
    assert np.abs(other - torch_logits(directory, ids[:, :32])).max() > 1e-2
    assert "seq_len is 64, so rotary positions are scaled by long_factor" in str(config.describe_difference_from_hf())
    assert change(config, seq_len=32).describe_difference_from_hf() is None


@pytest.mark.parametrize(
    ("name", "key"), [("llama", "num_attention_heads"), ("qwen2", "max_window_layers"), ("llama", "rope_theta")]
)
def test_null_is_the_default_as_an_absent_key_is(make_hf_model: Any, name: str, key: str) -> None:
    raw, _ = read(build(make_hf_model, name))
    kinds = ["full_attention"] * raw["num_hidden_layers"]
    absent = without({**raw, "layer_types": kinds, "rope_parameters": without(raw["rope_parameters"], key)}, key)
    null = {**absent, key: None, "rope_parameters": {"rope_theta": None, **absent["rope_parameters"]}}
    assert hf.config_from_hf(null) == hf.config_from_hf(absent)


def test_activations_without_a_counterpart_are_refused(make_hf_model: Any) -> None:
    raw, _ = read(build(make_hf_model, "llama"))
    for name in ("mish", "gelu_10"):
        with pytest.raises(UserError, match=r"config\.json: hidden_act: Input should be 'gelu', 'gelu_new', 'relu'"):
            hf.config_from_hf({**raw, "hidden_act": name})


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
    ],
)
def test_quantized_weights_are_refused(make_hf_model: Any, tmp_path: Path, block: dict[str, Any], method: str) -> None:
    plain = build(make_hf_model, "llama")
    assert read_hf_config(edited(plain, tmp_path / "none", {"quantization_config": None})) == read_hf_config(plain)
    with pytest.raises(UserError, match=rf"config\.json: .*quantized with {method}, which is not read; use the model"):
        read_hf_config(edited(plain, tmp_path / "quantized", {"quantization_config": block}))
