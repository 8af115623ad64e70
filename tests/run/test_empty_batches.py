"""Runs in which many batches have no token with a loss: prompts that fill whole rows, held-out sets without answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.core.batch import Batch
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.trackers import read_metrics
from tests.conftest import Lmt
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings

STEPS, ROWS, LENGTH, PROMPT = 12, 4, 16, 150
RUN: dict[str, Any] = {
    "model": {"type": "gpt2", "seq_len": LENGTH, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
    "data": {
        "tokenizer": "bytes",
        "train_urls": ["prompts.jsonl"],
        "validation_urls": ["prompts.jsonl"],
        "format": {"type": "supervised", "input_field": "instruction", "output_field": "output"},
        # Rows as `loss_tokens` counts them.
        "packing": "concat",
        "shuffle": False,
        "num_workers": 0,
    },
    "trainer": {
        "id": "run",
        "train_batch_size": ROWS,
        "num_train_steps": STEPS,
        "steps_per_eval": 6,
        "steps_per_log": 100,
        # The first batch of the held-out set is of prompts alone.
        "max_eval_batches": 1,
        "max_devices": 1,
        "elastic_shards": 2,
        "sample_tokens": 0,
        "token_probabilities": 0,
        "tracker": [],
        "watch": {"interval": 0},
    },
    "optimizer": {"learning_rate": 1e-2, "warmup": 0, "skip_bad_steps": 4},
}


def loss_tokens() -> np.ndarray:
    """Targets that count in each row of the text, by hand: those of an answer of two bytes and of the end after it."""
    document = [0] * PROMPT + [1, 1, 1]
    stream = np.array(document * 30)
    rows = len(stream) // LENGTH
    # A row's targets are the tokens one further on; the next document is not predicted from the end of the one before.
    targets = stream[1 : rows * LENGTH + 1] if len(stream) > rows * LENGTH else np.append(stream[1:], 0)
    return targets.reshape(rows, LENGTH).sum(1)


class Sometimes(Numbered):
    """Batches of which every second one has no token with a loss, and a held-out set that has none."""

    def train(self, *args: Any, **kwargs: Any) -> Iterator[Batch]:
        for number, rows in enumerate(super().train(*args, **kwargs), kwargs["first_step"]):
            yield rows if number % 2 else rows._replace(weights=np.zeros_like(rows.weights))

    def batches(self, *args: Any, **kwargs: Any) -> list[Batch]:
        return [rows._replace(weights=np.zeros_like(rows.weights)) for rows in super().batches(*args, **kwargs)]


@pytest.mark.slow
def test_empty_steps_are_counted_across_a_resume_and_alert_nobody(
    in_tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    # Alerts that compare each loss with those before, in which a loss of 0 would be the lowest.
    alerts = {"divergence": {"rise": 0.5, "window": 1}}
    for stop in (7, None):
        with Trainer(settings(num_train_steps=12, alerts=alerts, steps_per_log=100), OPTIMIZER, loss) as trainer:
            trainer.add_eval_hook(Sometimes())
            state = trainer.initial_state(model_init=Bigrams)
            for info in trainer.training_steps(state, trainer.data_loader(Sometimes())):
                if info.step == stop:
                    break
    empty = [line for line in read_metrics(in_tmp_path / "logs/own") if "data/steps_without_loss_tokens" in line]
    assert [(line["step"], line["data/steps_without_loss_tokens"]) for line in empty] == [
        (step, count) for count, step in enumerate(range(1, 12, 2), 1)
    ]
    assert {(line["train/loss"], line["optim/grad_norm"], line["data/loss_tokens"]) for line in empty} == {(0, 0, 0)}
    output = " ".join(capfd.readouterr().out.split())
    assert "alert" not in output
    assert output.count("no token of its batch has a loss, so that its loss and gradient are 0") == 2
    assert "step 12: no token of the held-out set has a loss" in output


@pytest.mark.slow
def test_batches_without_an_answer_are_counted_and_change_nothing_else(lmt: Lmt, in_tmp_path: Path) -> None:
    lines = [json.dumps({"instruction": "p" * PROMPT, "output": "ok"}) for _ in range(30)]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n")
    Path("run.yaml").write_text(yaml.safe_dump(RUN))
    assert lmt("data", "build", "run.yaml").returncode == 0
    result = lmt("train", "run.yaml")
    assert result.returncode == 0, result.stderr

    of_rows = loss_tokens()[: STEPS * ROWS]
    counted = of_rows.reshape(STEPS, ROWS).sum(1)
    empty = [step for step in range(1, STEPS + 1) if counted[step - 1] == 0]
    assert 2 < len(empty) < STEPS - 2
    output = " ".join(result.stdout.split())
    assert f"warning: in {np.mean(of_rows == 0):.1%} of the rows no token has a loss" in output
    assert output.count("no token of its batch has a loss") == 1
    assert "no token of the held-out set has a loss, so that nothing is evaluated" in output

    metrics = read_metrics("logs/run")
    logged = {line["step"]: line for line in metrics if "train/loss" in line}
    # Every empty step has a line, however seldom the others have.
    assert sorted(logged) == sorted({*empty, STEPS})
    for count, step in enumerate(empty, 1):
        line = logged[step]
        assert line["data/steps_without_loss_tokens"] == count
        assert (line["train/loss"], line["optim/grad_norm"], line["data/loss_tokens"]) == (0, 0, 0)
        assert line["optim/skipped_steps"] == 0
    assert not any(name.startswith("eval/") for line in metrics for name in line)
    assert not any("alert" in line for line in metrics)
    assert math.isfinite(json.loads(Path("logs/run/summary.json").read_text())["train_loss"])
    result = lmt("eval", "run", "--max-batches", "1")
    assert "validation: no token of what was read has a loss" in result.stderr
    assert "nan" not in result.stdout
    assert "inf" not in result.stdout


MIXTRAL = (
    "model: {type: mixtral, seq_len: 16, hidden_dim: 16, intermediate_dim: 16, num_layers: 1, num_heads: 2, "
    "num_kv_heads: 1, n_routed_experts: 4, num_experts_per_tok: 2, lbl_coef: 1.0}\n"
)
GPT2 = "model: {type: gpt2, seq_len: 16, hidden_dim: 16, num_layers: 1, num_heads: 2}\n"


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        pytest.param(GPT2, "z_loss_weight: 0.1\ntrainer: {", id="z-loss", marks=pytest.mark.slow),
        pytest.param(GPT2, "trainer: {determinism: fast, ", id="fast", marks=pytest.mark.slow),
        pytest.param(GPT2, "trainer: {determinism: layerwise, ", id="layerwise", marks=pytest.mark.slow),
        pytest.param(MIXTRAL, "trainer: {", id="experts", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_0_in_every_kind_of_step(tmp_path: Path, model: str, setting: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{model}{setting}train_batch_size: 4, num_train_steps: 2, elastic_shards: 2}}\n")
    setup = build_setup(load(file, [], RunConfig).config, 32, jax.devices()[:1])
    batch = random_batch(4, 16, 32)
    batch = batch._replace(weights=np.zeros((4, 16), np.float32))
    setup.step.compile(batch)
    state, metrics = setup.take_step(setup.init(), batch)
    for name in ("loss", "grad_norm", "tokens"):
        assert float(metrics[name]) == 0, name
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))
