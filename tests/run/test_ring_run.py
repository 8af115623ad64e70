"""A run whose devices share rows in a ring, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Lmt

CONFIG = {
    "model": {
        "type": "llama",
        "seq_len": 32,
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "attn_backend": "ring",
        "flash_attention_block_size": 4,
    },
    "data": {"tokenizer": "bytes", "num_workers": 0},
    "trainer": {
        "train_batch_size": 4,
        "elastic_shards": 4,
        "num_train_steps": 4,
        "max_eval_batches": 1,
        "context_axis_size": 2,
        "sample_tokens": 0,
        "token_probabilities": 0,
        "tracker": [],
        "checkpointer": {"save_interval": "0s", "keep": [{"every": 2}]},
    },
    "optimizer": {"type": "adam", "learning_rate": 1e-3, "warmup": 0},
}


@pytest.mark.slow
def test_a_run_in_a_ring_resumes_on_other_devices_with_equal_bits(
    lmt: Lmt, in_tmp_path: Path, text_files: tuple[Path, Path]
) -> None:
    train_text, held_out = map(str, text_files)
    data = {**CONFIG["data"], "train_urls": [train_text], "validation_urls": [held_out]}
    (in_tmp_path / "ring.yaml").write_text(json.dumps({**CONFIG, "data": data}))

    def train(name: str, devices: int) -> str:
        done = lmt("train", "ring.yaml", f"trainer.id={name}", f"trainer.max_devices={devices}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    train("whole", 2)
    train("resumed", 4)
    shutil.rmtree(in_tmp_path / "checkpoints/resumed/4")
    assert "resumed at step 2 of 4" in train("resumed", 8)
    compared = lmt("diff", "whole", "resumed")
    assert "4 steps in common" in compared.stdout
    assert "equal, bit for bit" in compared.stdout
    gathered = lmt("train", "ring.yaml", "trainer.id=resumed", "model.attn_backend=xla", "trainer.max_devices=2")
    assert gathered.returncode != 0
    assert "attn_backend" in gathered.stderr
