"""`lmt bench mfu` on a configuration that takes a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Lmt, refused
from tests.conftest import RunLmt

CONFIG = """
model: {type: gpt2, seq_len: 32, hidden_dim: 16, num_layers: 1, num_heads: 2}
data: {tokenizer: bytes}
trainer: {train_batch_size: 8}
"""


@pytest.fixture
def config(in_tmp_path: Path) -> Path:
    path = in_tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


def test_json_agrees_with_itself_and_with_a_hand_count(run_lmt: RunLmt, config: Path):
    result = run_lmt("bench", "mfu", config, "--steps", "3", "--warmup", "1", "--json", "model.num_layers=2")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    vocabulary = (found["num_params"] - 32 * 16 - 2 * 16 - 2 * 3280) // 16
    layer = 2 * 16 * 3 * 16 + 4 * 32 * 16 + 3 * 32 * 2 + 2 * 16 * 16 + 4 * 16 * 64
    assert vocabulary in range(257, 300)
    assert found["flops_per_token"] == 3 * (2 * layer + 2 * 16 * vocabulary)
    assert found["tokens_per_step"] == 8 * 32
    assert (found["device_count"], found["dtype"], found["datasheet"]) == (1, "float32", None)
    step = found["step_seconds"]
    assert 0 < step["minimum"] <= step["lower_quartile"] <= step["median"] <= step["upper_quartile"] <= step["maximum"]
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / step["median"])
    achieved = found["tokens_per_second"] * found["flops_per_token"]
    assert found["achieved_flops_per_second"] == pytest.approx(achieved)
    assert found["matmul"]["fraction"] == pytest.approx(achieved / found["matmul"]["flops_per_second"]["median"])
    assert found["matmul"]["size"] == 2048


def test_the_table_says_what_is_not_known_and_nothing_is_written(run_lmt: RunLmt, config: Path):
    result = run_lmt("bench", "mfu", config, "--steps", "2", "--warmup", "1")
    assert result.returncode == 0, result.stderr
    assert "n/a: no datasheet figure for float32 on 'cpu'" in result.stdout
    assert "of measured matmul peak" in result.stdout
    assert list(config.parent.iterdir()) == [config]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.hiden_dim=3"], ["model.hiden_dim", "hidden_dim"]),
        (["trainer.train_batch_size=12"], ["12"]),
        (["--steps", "0"], ["--steps"]),
    ],
    ids=str,
)
def test_mistakes_are_refused(lmt: Lmt, config: Path, arguments: list[str], words: list[str]):
    refused(lmt("bench", "mfu", config, *arguments), *words)
