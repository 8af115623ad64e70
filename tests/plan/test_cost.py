"""Time and cost of a run: expected, at a given MFU, and for devices without figures."""

from __future__ import annotations

import pytest

from lm_trainer.plan import parse_devices
from lm_trainer.plan.check_cost import check_cost
from lm_trainer.plan.cost import MFU, RunWork, training_machine, training_time
from lm_trainer.plan.speed import step_cost
from tests.plan.test_speed import MACHINE, cost_of, work_of

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


def test_checks_of_the_hardware_take_one_more_microbatch_of_each_device():
    cost = cost_of()
    assert check_cost(work_of(), MACHINE, cost.seconds) is None
    # Half of the two microbatches of a device; an update reads and writes 8 floats of a quarter of 1,000 parameters.
    microbatch = (cost.compute + cost.attention + cost.memory - 8 * 250 * 4 / 0.8e9) / 2
    checks = check_cost(work_of({"cross_check": {"every": 50}}), MACHINE, cost.seconds)
    assert checks is not None
    # Checksums read two gradients in float32.
    assert checks.seconds == pytest.approx(microbatch + 2 * 1000 * 4 / 0.8e9)
    assert checks.share == pytest.approx(checks.seconds / 50 / cost.seconds)

    layer = {"gather": "layer"}
    cost = cost_of(layer)
    microbatch = (cost.compute + cost.attention + cost.recompute + cost.memory - 8 * 250 * 4 / 0.8e9) / 2
    checks = check_cost(work_of({**layer, "cross_check": {"every": 50}}), MACHINE, cost.seconds)
    assert checks is not None
    # Gradients are in bfloat16, and three quarters of all layers come twice from other devices.
    assert checks.seconds == pytest.approx(microbatch + 2 * 1000 * 2 / 0.8e9 + 2 * 750 * 2 / 0.4e6)


@pytest.mark.parametrize("mfu", [None, 0.5])
def test_a_run_with_checks_takes_longer_than_its_steps(mfu: float | None):
    group, layout = parse_devices("4xH100"), work_of({"cross_check": {"every": 50}})
    work = RunWork(layout.training_flops, layout.tokens_per_step, steps=3, tokens=3 * layout.tokens_per_step)
    time = training_time(work, group, layout.trainer, layout=layout, mfu=mfu)
    assert time is not None
    assert time.checks is not None
    assert time.seconds == pytest.approx(3 * (time.step_seconds + time.checks.seconds / 50))
    if mfu is not None:
        assert time.checks.seconds == pytest.approx(time.step_seconds / 2)
