"""Caches that were built elsewhere, without the text they were made of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A cache with a tokenizer of its own, moved away from its text."""
    texts = [f"some words of document {i}" for i in range(20)]
    section: dict[str, Any] = {
        "source": {"type": "memory", "train": texts, "validation": ["held out"]},
        "tokenizer": {"type": "trained_bpe", "vocab_size": 300},
        "cache_dir": str(tmp_path / "first"),
    }
    open_data(DataConfig.model_validate(section), seq_len=8, seed=0)
    shutil.move(tmp_path / "first", tmp_path / "moved")
    return tmp_path / "moved"


def config(path: Path, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"source": {"type": "cache", "path": str(path)}, "shuffle": False, **more})


def test_opens_as_it_is_with_its_tokenizer(built: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.is_file()}
    data = open_data(config(built), seq_len=8, seed=0)
    batch = next(data.train(4, rows=range(4), num_steps=1))
    assert data.tokenizer.decode(np.asarray(batch.tokens).reshape(-1).tolist()).startswith("some words of document 0")
    assert len(data.validation()) == 1
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*") if path.is_file()} == times


def test_another_tokenizer_is_refused(built: Path) -> None:
    with pytest.raises(UserError, match=r"built with another tokenizer than data\.tokenizer:\n  sha256: the cache has"):
        open_data(config(built, tokenizer="bytes"), seq_len=8, seed=0)


def test_what_is_missing_is_named(built: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no cache; build one with: lmt data build"):
        open_data(config(tmp_path / "nothing"), seq_len=8, seed=0)
    shutil.rmtree(built / "validation")
    assert open_data(config(built), seq_len=8, seed=0).validation() == {}
    (built / "train/ledger.json").unlink()
    with pytest.raises(UserError, match="is not finished"):
        open_data(config(built), seq_len=8, seed=0)
    shutil.rmtree(built / "tokenizer")
    with pytest.raises(UserError, match=r"data\.tokenizer: none lies beside the cache, in .*moved/tokenizer; name"):
        open_data(config(built), seq_len=8, seed=0)


def test_validation_text_is_not_left_out_because_a_file_was_lost(built: Path) -> None:
    (built / "validation/manifest.json").unlink()
    with pytest.raises(UserError, match=r"moved/validation/manifest\.json is missing; remove"):
        open_data(config(built), seq_len=8, seed=0)


@pytest.mark.parametrize("key", ["cache_dir", "text_key"])
def test_keys_without_effect_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key} has no effect on a cache that is already built"):
        config(Path("x"), **{key: "y"})
