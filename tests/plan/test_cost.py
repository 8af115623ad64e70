"""Time and cost of a run: expected, at a given MFU, and for devices without figures."""

from __future__ import annotations

import pytest

from lm_trainer.plan import parse_devices
from lm_trainer.plan.cost import MFU, RunWork, training_machine, training_time
from lm_trainer.plan.speed import step_cost
from tests.plan.test_speed import work_of

LAYOUT = work_of({"gather": "auto", "determinism": "fast"})
WORK = RunWork(LAYOUT.training_flops, LAYOUT.tokens_per_step // 2, steps=3, tokens=3 * LAYOUT.tokens_per_step)


def test_the_expected_time_follows_from_the_cost_of_the_largest_step():
    group = parse_devices("4xH100")
    time = training_time(WORK, group, LAYOUT.trainer, layout=LAYOUT, price=2.0)
    machine = training_machine(group.kind, LAYOUT.trainer)
    assert time is not None
    assert machine is not None
    cost = step_cost(LAYOUT, machine)
    assert time.expected == cost
    # The first step has half of the tokens of the largest one.
    assert time.step_seconds == pytest.approx(cost.seconds / 2)
    assert time.seconds == pytest.approx(3 * cost.seconds)
    assert time.device_hours == pytest.approx(4 * 3 * cost.seconds / 3600)
    assert time.cost == pytest.approx(2.0 * time.device_hours)
    assert time.mfu == pytest.approx(WORK.flops / time.seconds / (4 * 989.5e12))
    assert time.tokens_per_second_per_device == pytest.approx(LAYOUT.tokens_per_step / cost.seconds / 4)


def test_an_mfu_overrides_the_expectation():
    time = training_time(WORK, parse_devices("4xH100"), LAYOUT.trainer, layout=LAYOUT, mfu=0.5)
    assert time is not None
    assert (time.mfu, time.expected) == (0.5, None)
    assert time.step_seconds == pytest.approx(WORK.flops_per_step / (0.5 * 4 * 989.5e12))
    machine = training_machine("NVIDIA H100 80GB HBM3", LAYOUT.trainer, mfu=0.5)
    assert machine is not None
    assert machine.product_rate == machine.attention_rate(64, backward=True) == 0.5 * 989.5e12


def test_devices_without_bandwidths_keep_an_assumed_mfu():
    time = training_time(WORK, parse_devices("4xv3"), LAYOUT.trainer, layout=LAYOUT)
    assert time is not None
    assert (time.mfu, time.expected) == (MFU, None)
    assert training_machine("TPU v3", LAYOUT.trainer) is None
    assert training_time(WORK, parse_devices("4xcpu"), LAYOUT.trainer, layout=LAYOUT) is None
