"""MFU and HFU in the metrics of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.profile.peaks import Peak
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.train import train
from lm_trainer.run.training import loop_parts
from lm_trainer.trackers import Progress

STEPS, SEQ, HIDDEN, HEADS = 3, 32, 16, 2
LAYER = 24 * HIDDEN**2 + 4 * SEQ * HIDDEN + 3 * SEQ * HEADS
"""FLOPs of a forward pass through a layer of GPT-2, per token."""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"determinism": "layerwise"}], ids=str)
def test_hfu_is_mfu_with_the_blocks_computed_again(
    settings: dict[str, Any], in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_parts, "datasheet_peak", lambda *_: Peak(1e12, "float32", "made up"))
    Path("text.txt").write_text("Nothing but a few words.\n" * 100)
    config = RunConfig.model_validate(
        {
            "model": {
                "type": "gpt2",
                "seq_len": SEQ,
                "hidden_dim": HIDDEN,
                "num_layers": 1,
                "num_heads": HEADS,
                "gradient_checkpointing": True,
            },
            "data": {"tokenizer": "bytes", "train_urls": ["text.txt"]},
            "trainer": {
                "id": "run",
                "num_train_steps": STEPS,
                "train_batch_size": 8,
                "elastic_shards": 8,
                "sample_tokens": 0,
                **settings,
            },
        }
    )
    train(config, name="run", progress=Progress(STEPS))
    lines = [json.loads(line) for line in Path("logs/run/metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "throughput/mfu" in line]
    step = 3 * (LAYER + 2 * HIDDEN * ByteTokenizer().vocab_size)
    assert len(timed) == STEPS - 1
    for line in timed:
        assert line["throughput/hfu"] / line["throughput/mfu"] == pytest.approx(1 + LAYER / step)
        assert line["throughput/mfu"] > 0
