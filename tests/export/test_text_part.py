"""The text model of published models that also read images, against what transformers computes for text alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import read_hf
from lm_trainer.models.text_part import text_tensors
from tests.conftest import Lmt, MakeHfModel

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 8}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": {**TEXT, "sliding_window": 16}, "vision_config": VISION},
    "Gemma4": {
        "text_config": {**TEXT, "hidden_size_per_layer_input": 0, "sliding_window": 16},
        "vision_config": VISION,
        "audio_config": None,
    },
    "Qwen3_5": {
        "text_config": {**TEXT, **DELTA, "rope_parameters": {**QWEN_ROPE, "mrope_section": [2, 1, 1]}},
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
    },
    "Llama4": {
        "text_config": {
            **TEXT,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 7,
            "floor_scale": 4,
        },
        "vision_config": {**VISION, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
    },
    "Mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
}


def published(make_hf_model: MakeHfModel, family: str, out: Path) -> Path:
    """A copy of a tiny model with a tokenizer, and with settings of its images."""
    model = make_hf_model(family, model_class=f"{family}ForConditionalGeneration", **FAMILIES[family])
    shutil.copytree(model, out)
    ByteTokenizer().save(out)
    (out / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    return out


def read_reference(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and logits that `make_hf_model` has written."""
    with np.load(directory / "reference.npz") as reference:
        return reference["input_ids"], reference["logits"]


def assert_same_logits(directory: Path, reference: Path) -> None:
    input_ids, expected = read_reference(reference)
    ids = jnp.asarray(input_ids, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    logits = read_hf(directory).build()(ids, positions, jnp.zeros_like(positions))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_computes_what_transformers_computes(
    make_hf_model: MakeHfModel, tmp_path: Path, family: str
) -> None:
    directory = published(make_hf_model, family, tmp_path / "model")
    assert_same_logits(directory, directory)


def test_an_export_is_a_model_that_reads_only_text(make_hf_model: MakeHfModel, tmp_path: Path, lmt: Lmt) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    directory = published(make_hf_model, "Qwen3_5", tmp_path / "model")
    assert lmt("import-hf", "model", "imported").returncode == 0
    result = lmt("export-hf", "imported", "out")
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert not {"text_config", "vision_config"} & config.keys()
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    input_ids, expected = read_reference(directory)
    with torch.no_grad():
        logits = model(torch.from_numpy(input_ids)).logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_a_text_model_that_transformers_cut_out_keeps_its_names(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    # transformers 5 writes `model.language_model.` into the files of the text model too.
    transformers = pytest.importorskip("transformers")
    directory = published(make_hf_model, "Qwen3_5", tmp_path / "model")
    transformers.AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "text")
    ByteTokenizer().save(tmp_path / "text")
    assert_same_logits(tmp_path / "text", directory)


def test_a_run_starts_from_it_and_says_what_is_not_read(make_hf_model: MakeHfModel, tmp_path: Path, lmt: Lmt) -> None:
    published(make_hf_model, "Gemma3", tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    keys = "initialize_from_hf: model\nuse_hf_model_config: true\ndata: {tokenizer: model, train_urls: [text.txt]}\n"
    (tmp_path / "run.yaml").write_text(keys + "trainer: {train_batch_size: 8, num_train_steps: 1, max_devices: 1}\n")
    result = lmt("train", "run.yaml", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "tensors of other parts than its text model are not read" in " ".join(result.stdout.split())


def test_text_models_without_a_family_are_refused_by_name(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    directory = published(make_hf_model, "Gemma3", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["model_type"] = "t5"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type='t5' is not supported; supported: apertus"):
        read_hf(directory)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match=r"are both model\.norm\.weight of the text model"):
        text_tensors({"language_model.model.norm.weight": 1, "model.language_model.norm.weight": 2})
