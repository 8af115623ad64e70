"""The learning rate of a whole run: what it takes from the other sections, and where its mistakes are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_trainer.config.loader import load
from lm_trainer.core.errors import ConfigError
from lm_trainer.run.config.run_config import RunConfig


def test_the_power_schedule_knows_batch_and_sequence(in_tmp_path: Path) -> None:
    Path("x.yaml").write_text(
        "model: {seq_len: 256}\n"
        "trainer: {num_train_steps: 100000, train_batch_size: 64}\n"
        "optimizer: {lr_schedule: power, learning_rate: 0.01, min_lr_ratio: 0}\n",
        encoding="utf-8",
    )

    def rate(*overrides: str) -> float:
        return load(Path("x.yaml"), overrides, RunConfig).config.learning_rate()(90_000)

    assert rate() == pytest.approx(64 * 4.6 * (90_000 * 64 * 256) ** -0.51)
    assert rate("trainer.train_batch_size=32") == pytest.approx(32 * 4.6 * (90_000 * 32 * 256) ** -0.51)
    assert rate("model.seq_len=1024") == pytest.approx(64 * 4.6 * (90_000 * 64 * 1024) ** -0.51)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "optimizer:\n  rewarmup: 10\n  decay: 25\n  cycles: [30, 70]\n",
            "x.yaml:2:13: optimizer: rewarmup (10 steps) and decay (25 steps) do not fit into cycle 3, steps 70 to 100",
        ),
        ("optimizer: {cycles: [30, 200]}\n", "x.yaml:1:21: optimizer.cycles: [30, 200] ends at step 200, but the run"),
        ("optimizer: {cycles: 2, cycle_length: 3}\n", "x.yaml:1:21: optimizer: set cycles (how many, or where they"),
        ("optimizer:\n  warmup: 1.5\n", "x.yaml:2:11: optimizer.warmup: 1.5 is neither a fraction (at most 1.0) nor"),
        ("optimizer:\n  cooldown: 3\n", "x.yaml:2:3: optimizer.cooldown: refused: deprecated; use `decay`"),
    ],
)
def test_mistakes_are_found_at_their_line(in_tmp_path: Path, text: str, problem: str) -> None:
    Path("x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(Path("x.yaml"), ["trainer.num_train_steps=100"], RunConfig)
    (reported,) = caught.value.problems
    assert reported.startswith(problem)
