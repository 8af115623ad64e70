"""A tiny run on real text, that every test here varies."""

from __future__ import annotations

import copy
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Plain = dict[str, Any]

BASE: Plain = {
    "model": {
        "type": "gpt2",
        "seq_len": 32,
        "hidden_dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "resid_pdrop": 0.1,
        "embed_pdrop": 0.1,
        "gradient_checkpointing": False,
        "scan_layers": True,  # compiles fastest
    },
    "data": {"tokenizer": "bytes", "num_workers": 0},
    "trainer": {
        "id": "run",
        "train_batch_size": 16,
        "elastic_shards": 8,
        "num_train_steps": 50,
        "steps_per_eval": 25,
        "max_eval_batches": 2,
        "sample_tokens": 0,
        "token_probabilities": 0,
        "tracker": [],
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "checkpointer": {"save_interval": "1h", "keep": [{"every": 20}]},
    },
    "optimizer": {"learning_rate": 3e-3, "warmup": 0.1},
}


def merge(base: Plain, changes: Plain) -> Plain:
    """`base` with the nested `changes` laid over it."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = merge(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return result


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The language reference that Python carries, as a training and a validation file."""
    directory = tmp_path_factory.mktemp("text")
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    train, validation = directory / "train.txt", directory / "validation.txt"
    train.write_text("\n".join(topics[:-8]), encoding="utf-8")
    validation.write_text("\n".join(topics[-8:]), encoding="utf-8")
    return train, validation


MakeConfig = Callable[..., Path]


def write_config(path: Path, text_files: tuple[Path, Path], changes: Plain) -> Path:
    """Writes the tiny run with these changes to `path`."""
    data = {"data": {"train_urls": [str(text_files[0])], "validation_urls": [str(text_files[1])]}}
    path.write_text(yaml.safe_dump(merge(merge(BASE, data), changes)))
    return path


@pytest.fixture
def make_config(tmp_path: Path, text_files: tuple[Path, Path]) -> MakeConfig:
    """`make_config(trainer={...}, ...)`: writes the tiny run with these changes to tmp_path/run.yaml."""

    def make(**changes: Plain) -> Path:
        return write_config(tmp_path / "run.yaml", text_files, changes)

    return make
