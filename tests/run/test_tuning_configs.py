"""The shipped configurations that tune or distil the model of gpt2_nano.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_trainer.config.loader import load
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import ROOT, run_here

CONFIGS = ("sft_nano", "dpo_nano", "distill_nano")


def run_config(name: str, run: str, *keys: str) -> dict[str, float]:
    """Trains a shipped configuration. Returns the last value of each metric."""
    path = ROOT / "configs" / f"{name}.yaml"
    done = run_here("train", path, f"--trainer.id={run}", "--trainer.max_devices=1", *keys)
    assert done.returncode == 0, done.stderr
    values: dict[str, float] = {}
    for line in Path(f"logs/{run}/metrics.jsonl").read_text().splitlines():
        values.update(json.loads(line))
    return values


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_valid_and_fits_the_model_it_starts_from(name: str) -> None:
    config, base = (load(ROOT / "configs" / f"{x}.yaml", [], RunConfig).config for x in (name, "gpt2_nano"))
    assert (config.model.type, config.model.seq_len) == (base.model.type, base.model.seq_len)
    if config.trainer.initialize_from is not None:
        assert config.model.spec(300) == base.model.spec(300)


@pytest.mark.slow
def test_each_trains_from_the_nano_model(in_tmp_path: Path) -> None:
    steps = ("--trainer.num_train_steps=2", "--trainer.steps_per_eval=2", "--trainer.max_eval_batches=1")
    run_config("gpt2_nano", "base", *steps)
    for name in CONFIGS:
        values = run_config(name, name, *steps)
        assert values["train/loss"] > 0
        assert "eval/loss" in values
