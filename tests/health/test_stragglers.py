"""The process of a run that makes the others wait, found by the times that each needs by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.health.alerts import AlertsConfig
from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.health.alerts.straggler import Straggler
from lm_trainer.health.stragglers import StepTimer, Stragglers

NAMES = [f"process {index} of 4 (node{index})" for index in range(4)]
DEFAULT = Straggler()
USUAL = [[0.0, 0.2], [0.01, 0.21], [0.0, 0.19], [0.0, 0.2]]


class Recorder:
    """Progress, and trackers, that keep what they are given."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.alerts: list[tuple[str, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        del message
        self.alerts.append((kind, step))


def watch(times_by_step: list[Any], config: Straggler | None = DEFAULT, names: list[str] = NAMES) -> Recorder:
    recorder: Any = Recorder()
    stragglers = Stragglers(config, Alerts(AlertsConfig(), Path("run"), recorder, recorder, sends=True), names)
    if stragglers.timer is not None:
        stragglers.timer.step_time = 0.5
    for step, times in enumerate(times_by_step, 1):
        stragglers.receive(step, np.array(times, np.float32))
    stragglers.close()
    return recorder


def test_the_process_that_makes_the_others_wait_is_named_once() -> None:
    slow = [*USUAL[:2], [0.3, 0.2], USUAL[3]]
    recorder = watch([slow] * 30)
    assert recorder.alerts == [("straggler", 20)]
    assert recorder.notes == [
        "alert: step 20: process 2 of 4 (node2) makes the others wait for 0.3 s of a step of 0.5 s (means of 20 "
        "steps): its host and data take 0.3 s, its devices 0.2 s, and a usual process takes 0.2 s for both; `lmt bench "
        "hardware` there checks its devices (straggler)"
    ]
    assert watch([slow] * 30, config=None).alerts == []
    assert watch([slow] * 30, names=[]).alerts == [], "one process has none to wait for"


@pytest.mark.parametrize(
    "times_by_step",
    [
        pytest.param([USUAL] * 60, id="alike"),
        # A fifth of 0.5 s is needed.
        pytest.param([[*USUAL[:3], [0.09, 0.2]]] * 60, id="nearly alike"),
        pytest.param([USUAL] * 30 + [[*USUAL[:3], [60.0, 0.2]]] * 2 + [USUAL] * 30, id="a checkpoint"),
        pytest.param([[[0.4, 0.2]] * 4] * 60, id="all are slow"),
    ],
)
def test_no_process_is_named_without_a_reason(times_by_step: list[Any]) -> None:
    assert watch(times_by_step).alerts == []


def test_frequent_short_pauses_are_found() -> None:
    paused = [*USUAL[:3], [0.5, 0.2]]
    assert watch([paused, USUAL, USUAL] * 10).alerts == [("straggler", 20)]


def test_of_two_processes_the_slower_one_is_named() -> None:
    recorder = watch([[[0.3, 0.1], [0.0, 0.1]]] * 20, names=NAMES[:2])
    assert "process 0 of 4 (node0) makes the others wait for 0.3 s" in recorder.notes[0]


def test_own_times_leave_out_what_other_processes_take() -> None:
    now, loss = [0.0], jnp.zeros(())
    timer = StepTimer(lambda: now[0])

    def wait(seconds: float) -> None:
        timer._waiting.submit(int).result()  # the clock has been read
        now[0] += seconds

    def step(host: float, gather: float, compute: float, exchange: float) -> None:
        wait(host)
        timer.begin()
        wait(gather)
        timer.mark("gathered", [loss])
        wait(compute)
        timer.mark("computed", [loss])
        wait(exchange)
        timer.end(loss)
        wait(0.0)

    step(1, 1, 1, 1)
    step(0.5, 2, 4, 8)
    # A step is measured at the beginning of the next one.
    assert timer.own_time == (0.0, 0.0)
    step(16, 32, 64, 128)
    assert (timer.own_time, timer.step_time) == ((0.5, 4.0), 14.5)
    timer.close()


def test_arrays_that_later_programs_consume_are_not_waited_for() -> None:
    timer, consumed = StepTimer(), jnp.zeros(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(consumed)
    for _ in range(3):
        timer.begin()
        timer.mark("gathered", [consumed])
        timer.mark("computed", [consumed])
        timer.end(jnp.zeros(()))
        timer._waiting.submit(int).result()
    assert timer.own_time.devices == 0.0
    timer.close()


def test_a_run_of_one_process_measures_nothing() -> None:
    alerts: Any = SimpleNamespace()
    stragglers = Stragglers(Straggler(), alerts, [])
    stragglers.receive(1, None)
    assert (stragglers.timer, stragglers.metrics()) == (None, {})
    assert [*stragglers.to_send()] == [0.0, 0.0]
