"""The vocabulary that is planned and measured with is that of the run, as far as this machine can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.vocabulary import find_vocabulary


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(changes)


def test_a_tokenizer_that_is_here_is_asked(tmp_path: Path):
    ByteTokenizer().save(tmp_path)
    assert find_vocabulary(config(data={"tokenizer": "bytes"})) == (257, None)
    assert find_vocabulary(config(data={"tokenizer": str(tmp_path)})) == (257, None)
    assert find_vocabulary(config(data={"tokenizer": {"type": "trained_bpe", "vocab_size": 300}})) == (300, None)


def test_a_tokenizer_that_was_downloaded_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    ByteTokenizer().save(snapshot)
    (tmp_path / "models--org--name/refs").mkdir()
    (tmp_path / "models--org--name/refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_vocabulary(config(data={"tokenizer": "org/name"})) == (257, None)


def test_what_only_the_hub_knows_is_assumed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    rows, note = find_vocabulary(config(data={"tokenizer": "org/name"}))
    assert rows == 50_257
    assert note is not None
    assert "org/name is not on this machine" in note


@pytest.mark.parametrize("name", ["/nowhere/tokenizer", "nowhere/tokenizer.json", "org/name with spaces"])
def test_a_name_that_can_mean_nothing_is_refused(name: str):
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        find_vocabulary(config(data={"tokenizer": name}))


def test_a_checkpoint_to_start_from_decides(tiny_gpt2: Path, tmp_path: Path):
    plain = json.loads((tiny_gpt2 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "vocab_size": 320}))
    assert find_vocabulary(config(initialize_from_hf=str(tmp_path), data={"tokenizer": "org/name"})) == (320, None)
