"""The difference of two losses at equal tokens, against a simulation of runs whose difference is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.report.difference import compute_loss_difference
from lm_trainer.report.run import ReportedRun
from lm_trainer.run.files.branch import BranchPoint


def make_run(steps: np.ndarray, losses: np.ndarray, tokens: np.ndarray) -> ReportedRun:
    metrics: Any = {"train/loss": (steps, losses), "throughput/total_tokens": (steps, tokens)}
    return ReportedRun(
        "x", Path(), "done", int(steps[-1]), None, {}, {}, (), metrics, (), (), (), {}, (), None, (),
        BranchPoint("p", "p", 1, 1),
    )  # fmt: skip


def test_the_interval_covers_a_known_difference_and_the_shared_steps_are_left_out() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(1, 2001)
    covered = []
    for _ in range(200):
        # Both runs see the same batches, so their noise is common. What is left is correlated from step to step.
        batch_noise, own = rng.standard_normal(2000), rng.standard_normal(2100)
        moving = np.convolve(own, np.ones(5) / 5, "same")[:2000]
        a = 3 + 0.2 * batch_noise
        b = a + np.where(steps > 500, 0.01 + 0.01 * moving, 0)
        difference = compute_loss_difference(make_run(steps, b, steps * 10), make_run(steps, a, steps * 10), 500)
        assert difference is not None
        assert (difference.points, difference.tokens) == (750, (12510, 20000))
        covered.append(difference.interval[0] < 0.01 < difference.interval[1])
    assert np.mean(covered) == pytest.approx(0.95, abs=0.04)


def test_runs_are_paired_by_tokens_and_not_by_steps() -> None:
    steps = np.arange(1, 401)
    small = make_run(steps, 9 - steps * 0.01, steps * 10)
    # Twice the batch: half as many steps for the same tokens, and the loss is the same function of tokens plus 0.5.
    large = make_run(steps, 9.5 - steps * 0.02, steps * 20)
    difference = compute_loss_difference(large, small, 0)
    assert difference is not None
    assert difference.mean == pytest.approx(0.5)
    assert difference.tokens[1] == 4000
    assert compute_loss_difference(large, small, 370) is None, "too few points"
