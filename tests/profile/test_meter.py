"""Throughput while a run runs, with a clock that the test turns."""

from __future__ import annotations

import pytest

from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec
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
        results.append(meter.step(tokens))
    return results


def test_the_first_step_has_no_time_but_counts_its_tokens():
    clock = Clock()
    first, second = steps(meter(clock), clock, (100, 60.0), (100, 0.5))
    assert first == {"throughput/total_tokens": 100, "throughput/loading_time": 0.0}
    assert second == {
        "throughput/total_tokens": 200,
        "throughput/loading_time": 0.0,
        "throughput/step_time": 0.5,
        "throughput/tokens_per_second": 200.0,
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
    it = meter(clock)
    steps(it, clock, (100, 1.0), (100, 1.0))
    it.pause()
    after, later = steps(it, clock, (100, 500.0), (100, 1.0))
    assert "throughput/step_time" not in after
    assert later["throughput/tokens_per_second"] == 100.0
    assert later["throughput/total_tokens"] == 400


def test_a_resumed_run_goes_on_counting():
    clock = Clock()
    assert meter(clock, total_tokens=1000).step(24)["throughput/total_tokens"] == 1024


def test_waiting_for_data_is_passed_on():
    assert meter(Clock()).step(1, loading=0.25)["throughput/loading_time"] == 0.25


def test_an_unknown_peak_gives_no_mfu():
    clock = Clock()
    assert "throughput/mfu" not in steps(meter(clock, peak_flops=None), clock, (1, 1.0), (1, 1.0))[-1]


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 156e12),
        ("cpu", "float32", None),
    ],
)
def test_a_model_on_a_machine(kind, dtype, peak, monkeypatch):
    block = BlockSpec(AttentionSpec(num_heads=4, head_dim=8), MlpSpec(hidden_dim=128))
    spec = DecoderSpec(vocab_size=50257, hidden_dim=32, num_positions=1024, blocks=(block, block))
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    it = Meter.for_model(spec, seq_len=1024, dtype=dtype, device_kind=kind, device_count=4)
    it._clock = clock
    last = steps(it, clock, (0, 1.0), (1e6, 1.0))[-1]
    # 3,552,320 FLOPs for a token forward: this model by the published formula; backward is twice that.
    expected = None if peak is None else pytest.approx(100 * 3 * 3_552_320 * 1e6 / (4 * peak))
    assert last.get("throughput/mfu") == expected
