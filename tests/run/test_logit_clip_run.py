"""A run with QK-Clip: resumed, read, exported, and started from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lm_trainer.core.tree import named_leaves
from lm_trainer.nn.logit_clip import is_largest_logits
from lm_trainer.run.weights.saved_model import load_model
from tests.conftest import Lmt
from tests.run.conftest import MakeConfig


@pytest.mark.slow
def test_a_run_is_resumed_read_exported_and_started_from(make_config: MakeConfig, in_tmp_path: Path, lmt: Lmt) -> None:
    config = make_config(
        optimizer={"type": "muon", "qk_clip": 0.02},
        trainer={"num_train_steps": 4, "max_devices": 1, "checkpointer": {"keep": [{"every": 2}]}},
    )
    metrics = in_tmp_path / "logs" / "run" / "metrics.jsonl"

    def train(*settings: str) -> str:
        assert lmt("train", str(config), *settings).returncode == 0
        return re.findall(r'"fingerprint": "(\w+)"', metrics.read_text())[-1]

    undisturbed = train()
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    clipped = [record["train/qk_clipped_heads"] for record in records if "train/loss" in record]
    assert max(clipped) > 0
    shutil.rmtree(in_tmp_path / "checkpoints/run/4")
    assert train() == undisturbed
    assert not [name for name in named_leaves(load_model("run").params) if is_largest_logits(name)]
    assert lmt("export-hf", "run", "exported").returncode == 0
    for limit in ("0.02", "null"):
        train(f"trainer.id=from{limit}", "trainer.initialize_from=run", f"optimizer.qk_clip={limit}")
