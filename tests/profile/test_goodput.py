"""Goodput over several attempts, with a clock that the test turns, beside a sum by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_trainer.profile.goodput import GOODPUT, WALL_TIME, Goodput
from lm_trainer.profile.meter import Meter


def attempt(file: Path, start: int, seconds: list[float], *, start_up: float) -> dict[str, float]:
    """An attempt from step `start`: it takes `start_up` seconds, then each step so many; returns its last metrics."""
    now = 0.0
    goodput = Goodput.resume(file, start, now)
    goodput._clock = lambda: now
    lines = [line for line in file.read_text().splitlines() if json.loads(line)["step"] <= start] if start else []
    metrics: dict[str, float] = {}
    now += start_up
    for step, time in enumerate(seconds, start + 1):
        now += time
        metrics = goodput.record_step(time)
        lines += [json.dumps({"step": step, "train/loss": 1.0, **metrics}), json.dumps({"step": step, "alert": "x"})]
    file.write_text("".join(f"{line}\n" for line in lines))
    return metrics


def test_lost_steps_count_as_time_and_not_as_kept(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first = attempt(file, 0, [2.0] * 10, start_up=5.0)
    assert first == {GOODPUT: pytest.approx(20 / 25), WALL_TIME: 25.0}
    # From the checkpoint of step 6: four steps come again.
    second = attempt(file, 6, [1.0, 1.0], start_up=3.0)
    assert second == {GOODPUT: pytest.approx((12 + 2) / (25 + 5)), WALL_TIME: 30.0}
    third = attempt(file, 8, [4.0], start_up=0.0)
    assert third == {GOODPUT: pytest.approx((12 + 2 + 4) / 34), WALL_TIME: 34.0}


def test_a_run_that_begins_again_owes_nothing_to_old_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    attempt(file, 0, [2.0] * 3, start_up=5.0)
    assert attempt(file, 0, [1.0], start_up=1.0) == {GOODPUT: 0.5, WALL_TIME: 2.0}


@pytest.mark.parametrize("size", [1, 40, 5000])
def test_lines_of_any_length_and_a_torn_one_are_read(tmp_path: Path, size: int, monkeypatch) -> None:
    monkeypatch.setattr("lm_trainer.profile.goodput._CHUNK", 64)
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, WALL_TIME: 10.0 * n, GOODPUT: 0.5, "text": "ä" * size}) for n in range(1, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 6, "throughput/wa')
    goodput = Goodput.resume(file, 3, 0.0)
    goodput._clock = lambda: 1.0
    assert goodput.record_step(0.0) == {GOODPUT: pytest.approx(15 / 51), WALL_TIME: 51.0}


def test_the_meter_leaves_waiting_and_pauses_out() -> None:
    now = 0.0
    goodput = Goodput(0.0, 0.0, now, clock=lambda: now)
    meter = Meter(flops_per_token=0.0, peak_flops=None, goodput=goodput, clock=lambda: now)
    shares = []
    for seconds, loading in ((6.0, 0.0), (2.0, 0.5), (2.0, 0.5)):
        now += seconds
        shares.append(meter.record_step(8, loading=loading)[GOODPUT])
    assert shares == [0.0, pytest.approx(1.5 / 8), pytest.approx(3.0 / 10)]
    meter.pause()
    now += 10.0
    assert meter.record_step(8)[GOODPUT] == pytest.approx(3.0 / 20)
