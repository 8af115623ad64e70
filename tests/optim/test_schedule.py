"""Schedules against optax where it has the same one, and against hand-computed points."""

from __future__ import annotations

import math

import numpy as np
import optax
import pytest

from lm_trainer.optim import AdamConfig
from lm_trainer.optim.schedule import ScheduleName, build_schedule, plan_phases


def schedule(name: ScheduleName, *, warmup: float = 0, decay: float | None = None, total: int = 100, m: float = 0.1):
    return build_schedule(name, plan_phases(warmup, decay, total), peak=2.0, min_ratio=m)


def test_cosine_with_warmup_equals_optax() -> None:
    ours = schedule("cosine", warmup=10)
    reference = optax.warmup_cosine_decay_schedule(0.0, 2.0, warmup_steps=10, decay_steps=100, end_value=0.2)
    for step in range(130):
        assert ours(step) == pytest.approx(float(np.asarray(reference(step))), rel=1e-5, abs=1e-7), step


def test_warmup_stable_decay_equals_optax() -> None:
    ours = schedule("linear", warmup=0.1, decay=0.2)
    reference = optax.join_schedules(
        [optax.linear_schedule(0, 2.0, 10), optax.constant_schedule(2.0), optax.linear_schedule(2.0, 0.2, 20)],
        [10, 80],
    )
    for step in range(120):
        assert ours(step) == pytest.approx(float(np.asarray(reference(step))), rel=1e-5), step


def test_points_by_hand() -> None:
    assert schedule("constant", warmup=4)(2) == 1.0
    assert schedule("constant", warmup=4)(90) == 2.0
    assert schedule("inv")(50) == pytest.approx(2 / (1 + 9 * 0.5))
    assert schedule("inv")(100) == pytest.approx(0.2)
    assert schedule("inv_sqrt", warmup=10, m=0.0)(50) == pytest.approx(2 * math.sqrt(10 / 50))
    assert schedule("inv_sqrt", warmup=1, m=0.5)(90) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["linear", "cosine", "inv"])
def test_every_decay_begins_at_the_peak_and_ends_at_the_minimum(name: ScheduleName) -> None:
    rate = schedule(name, warmup=10)
    assert rate(0) == 0.0
    assert rate(10) == pytest.approx(2.0)
    assert rate(100) == pytest.approx(0.2)
    assert rate(10**6) == pytest.approx(0.2)
    assert all(rate(step) >= rate(step + 1) for step in range(10, 120))


def test_phases_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup \(60 steps\) and decay \(50 steps\) do not fit into 100"):
        plan_phases(0.6, 50, 100)
    with pytest.raises(ValueError, match="min_lr_ratio above 0"):
        schedule("inv", m=0.0)


def test_the_configuration_builds_its_schedule() -> None:
    rate = AdamConfig(learning_rate=1e-3, warmup=5, min_lr_ratio=0.0).schedule(20)
    assert rate(5) == pytest.approx(1e-3)
    assert rate(20) == 0.0
