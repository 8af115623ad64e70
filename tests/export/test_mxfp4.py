"""Weights in MXFP4 are read as transformers dequantizes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lm_trainer.core.errors import UserError
from lm_trainer.export.huggingface import read_hf_settings
from lm_trainer.export.mxfp4_tensor import MXFP4
from lm_trainer.export.weights import SINGLE_FILE, Weights
from lm_trainer.models import hf
from tests.models.test_hf_families import our_logits

SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 16, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def quantized(make_hf_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all codes, and exponents of numbers between 2^-6 and 1."""
    out = tmp_path_factory.mktemp("mxfp4") / "model"
    shutil.copytree(make_hf_model("GptOss", **SIZES), out)
    tensors, rng = load_file(out / SINGLE_FILE), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(121, 126, shape, np.uint8)
    save_file(tensors, out / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    block = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return out


def test_the_values_and_logits_are_those_of_transformers(quantized: Path) -> None:
    import torch
    import transformers

    dequantize = transformers.Mxfp4Config(dequantize=True)  # pyright: ignore[reportAttributeAccessIssue]
    model: Any = transformers.GptOssForCausalLM.from_pretrained(
        quantized, quantization_config=dequantize, dtype=torch.float32, attn_implementation="eager"
    )
    config, vocab_size, settings = read_hf_settings(quantized)
    assert "quantization_config" not in settings.config
    weights = Weights(quantized)
    assert weights.dtypes == {"F32", MXFP4}
    values = weights[GATE_UP]
    assert len(np.unique(np.abs(values))) > 10
    np.testing.assert_array_equal(values, model.state_dict()[GATE_UP].numpy())
    ids = np.random.default_rng(0).integers(0, 67, (2, 48))
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(ids)).logits.numpy()
    hf.plan_reading(config, vocab_size, *weights.shapes_and_files())
    assert np.abs(our_logits(config, vocab_size, dict(weights), ids) - expected).max() <= 1e-4


def test_a_region_is_read_from_its_blocks(quantized: Path) -> None:
    stored = Weights(quantized).stored[GATE_UP]
    whole = stored.read()
    assert whole.shape == stored.shape == (3, 64, 64)
    for region in ((slice(1, 3), slice(5, 41), slice(7, 8)), (slice(0, 1), slice(32, 64), slice(0, 64))):
        np.testing.assert_array_equal(stored.read(region), whole[region])
    np.testing.assert_array_equal(stored.read((slice(2, 3),)), whole[2:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[f"{GATE_UP}_scales"].fill(255), "gate_up_proj holds NaN or infinite values"),
        (lambda tensors: tensors[f"{GATE_UP}_scales"].fill(254), "gate_up_proj holds NaN or infinite values"),
        (lambda tensors: tensors.update({f"{GATE_UP}_scales": np.zeros((3, 64, 1), np.uint8)}), "MXFP4 has 16 bytes"),
        (lambda tensors: tensors.update({GATE_UP: np.zeros((3, 64, 64), np.float32)}), "is there both as MXFP4 and"),
    ],
)
def test_unsound_tensors_are_refused(quantized: Path, tmp_path: Path, change: Any, message: str) -> None:
    tensors = load_file(quantized / SINGLE_FILE)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(UserError, match=message):
        Weights(tmp_path)[GATE_UP]
