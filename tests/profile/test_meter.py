"""Throughput while a run runs, with a clock that the test turns."""

from __future__ import annotations

import pytest

from lm_trainer.profile.meter import Meter


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock, **kwargs) -> Meter:
    return Meter(**{"flops_per_token": 1e9, "peak_flops": 1e13, "clock": clock} | kwargs)


def steps(meter: Meter, clock: Clock, *timed: tuple[float, float]) -> list[dict[str, float]]:
    results = []
    for tokens, seconds in timed:
        clock.now += seconds
        results.append(meter.record_step(tokens))
    return results


def test_the_first_step_has_no_time():
    clock = Clock()
    first, second = steps(meter(clock), clock, (100, 60.0), (100, 0.5))
    assert first == {"throughput/loading_time": 0.0}
    assert second == {
        "throughput/loading_time": 0.0,
        "throughput/step_time": 0.5,
        "throughput/tokens_per_second": 200.0,
        "throughput/data_wait": 0.0,
        "throughput/mfu": pytest.approx(100 * 200 * 1e9 / 1e13),
    }


def test_speed_is_tokens_over_time_of_the_window():
    clock = Clock()
    timed = [(0, 1.0), (999, 9.0), (100, 1.0), (300, 3.0), (80, 1.0)]
    last = steps(meter(clock, window=3), clock, *timed)[-1]
    assert last["throughput/step_time"] == 1.0
    assert last["throughput/tokens_per_second"] == pytest.approx(480 / 5.0)


def test_a_pause_is_left_out():
    clock = Clock()
    paused_meter = meter(clock)
    steps(paused_meter, clock, (100, 1.0), (100, 1.0))
    paused_meter.pause()
    after, later = steps(paused_meter, clock, (100, 500.0), (100, 1.0))
    assert "throughput/step_time" not in after
    assert later["throughput/tokens_per_second"] == 100.0


def test_waiting_for_data_is_passed_on():
    assert meter(Clock()).record_step(1, loading=0.25)["throughput/loading_time"] == 0.25


def test_the_share_of_waiting_is_taken_over_the_window():
    clock = Clock()
    small_meter = meter(clock, window=2)
    shares = []
    for loading in (9.0, 0.5, 1.0, 0.0, 50.0):
        clock.now += 2.0
        shares.append(small_meter.record_step(100, loading=loading).get("throughput/data_wait"))
    assert shares == [None, 0.25, 0.375, 0.25, 1.0]


def test_an_unknown_peak_gives_no_mfu():
    clock = Clock()
    assert "throughput/mfu" not in steps(meter(clock, peak_flops=None), clock, (1, 1.0), (1, 1.0))[-1]


def test_hfu_counts_what_is_computed_again_and_mfu_does_not():
    clock = Clock()
    last = steps(meter(clock, recomputed=2.5e8), clock, (100, 1.0), (100, 0.5))[-1]
    assert last["throughput/mfu"] == pytest.approx(100 * 200 * 1e9 / 1e13)
    assert last["throughput/hfu"] == pytest.approx(100 * 200 * 1.25e9 / 1e13)
    unknown = steps(meter(Clock()), clock, (100, 1.0), (100, 0.5))[-1]
    assert "throughput/hfu" not in unknown
