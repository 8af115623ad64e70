"""A model that hears in Hugging Face's layout, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import ExportOptions, TextModel, read_hf, write_hf
from lm_trainer.models import WhisperConfig, hf
from tests.models.test_whisper import HF_FIELDS, make

GENERATION_FIELDS: dict[str, Any] = {
    "decoder_start_token_id": 3,
    "eos_token_id": 256,
    "suppress_tokens": [9],
    "begin_suppress_tokens": [7, 2],
    "lang_to_id": {"<|en|>": 40},
    "no_timestamps_token_id": 46,
    "alignment_heads": [[0, 1]],
    "return_timestamps": False,
}


def test_generation_config_and_weights_survive_the_way_out_and_in(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    original = make(tmp_path / "theirs", vocab_size=257, eos_token_id=256)
    (tmp_path / "theirs" / "generation_config.json").write_text(
        json.dumps({**GENERATION_FIELDS, "transformers_version": "5"})
    )
    ByteTokenizer().save(tmp_path / "theirs")
    read = read_hf(tmp_path / "theirs")
    assert isinstance(read.config, WhisperConfig)
    write_hf(tmp_path / "ours", read, ExportOptions())
    reread = read_hf(tmp_path / "ours")
    assert reread.config == read.config
    written = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert written == {**GENERATION_FIELDS, "transformers_version": "5"}
    loaded, info = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, x in loaded.state_dict().items():
        np.testing.assert_array_equal(x.numpy(), original.state_dict()[name].numpy(), err_msg=name)
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "automatic-speech-recognition" in card
    assert "WhisperForConditionalGeneration.from_pretrained" in card
    assert loaded.generation_config.begin_suppress_tokens == [7, 2]


def test_a_model_made_here_says_how_its_texts_begin(tmp_path: Path) -> None:
    fields = {key: HF_FIELDS[key] for key in ("decoder_start_token_id", "pad_token_id")}
    config = WhisperConfig(
        seq_len=8, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=8, encoder_layers=1, encoder_heads=1,
        encoder_intermediate_dim=8, num_mels=4, num_frames=4, **fields,
    )  # fmt: skip
    shapes = hf.param_infos(config, 257)
    params: dict[str, Any] = {}
    for name, info in shapes.items():
        *parents, last = name.split(".")
        subtree = params
        for parent in parents:
            subtree = subtree.setdefault(parent, {})
        subtree[last] = np.zeros(info.shape, np.float32)
    write_hf(tmp_path / "out", TextModel(config, 257, params, ByteTokenizer(), "small"), ExportOptions())
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["decoder_start_token_id"] == 3
    assert written["eos_token_id"] == ByteTokenizer().eos_id
