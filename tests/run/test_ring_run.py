"""A run whose devices share rows in a ring, from the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import RunLmt

CONFIG = """
model: {type: llama, seq_len: 32, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1,
        attn_backend: ring, flash_attention_block_size: 4}
data: {tokenizer: bytes}
trainer: {train_batch_size: 4, elastic_shards: 4, num_train_steps: 4, context_axis_size: 2, cpu_threads: 8,
          sample_tokens: 0, tracker: [], checkpointer: {save_interval: 0s, keep: [{every: 2}]}}
optimizer: {type: adam, learning_rate: 1e-3, warmup: 0}
"""


@pytest.mark.slow
@pytest.mark.optimised
def test_a_run_in_a_ring_resumes_on_other_devices_with_equal_bits(run_lmt: RunLmt, tmp_path: Path) -> None:
    (tmp_path / "ring.yaml").write_text(CONFIG)

    def train(name: str, devices: int) -> str:
        done = run_lmt("train", "ring.yaml", f"trainer.id={name}", devices=devices)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train("whole", 2)
    train("resumed", 4)
    shutil.rmtree(tmp_path / "checkpoints/resumed/4")
    assert "resumed at step 2 of 4" in train("resumed", 8)
    found = run_lmt("diff", "whole", "resumed")
    assert "4 steps in common" in found.stdout
    assert "equal, bit for bit" in found.stdout
    gathered = run_lmt("train", "ring.yaml", "trainer.id=resumed", "model.attn_backend=xla", devices=2)
    assert gathered.returncode != 0
    assert "attn_backend" in gathered.stderr
