"""The instrument itself: what it times, in which order, and what it makes of it."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.profile.matmul import MatmulProbe
from lm_trainer.profile.mfu import measure_mfu, report_rows
from lm_trainer.profile.timing import Spread


@dataclass
class Machine:
    """A workload and a probe on a clock of their own, whose durations the test sets."""

    step_seconds: list[float]
    matmul_seconds: list[float]
    device_kind: str = "NVIDIA A100-SXM4-80GB"
    dtype: str = "bfloat16"
    device_count: int = 2
    tokens_per_step: float = 1000.0
    flops_per_token: float = 6e9
    recomputed_flops_per_token: float = 1.5e9
    num_params: int = 10**9
    vocab_size: int = 50_257
    flops: float = 5e12
    size: int = 8192
    now: float = 0.0
    calls: list[str] = field(default_factory=list)

    def run_step(self) -> None:
        self.now += self.step_seconds[min(self.calls.count("step"), len(self.step_seconds) - 1)]
        self.calls.append("step")

    def run(self) -> float:
        self.calls.append("matmul")
        return self.matmul_seconds[min(self.calls.count("matmul") - 1, len(self.matmul_seconds) - 1)]


def measured(monkeypatch: pytest.MonkeyPatch, machine: Machine, **kwargs: Any) -> Any:
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    return measure_mfu(machine, machine, **kwargs)


def test_warm_up_does_not_count_and_the_rest_is_timed_in_turn(monkeypatch):
    machine = Machine([90.0, 2.0, 0.25, 0.5, 0.75, 0.5], [9.0, 0.02])
    report = measured(monkeypatch, machine, samples=4, warmup=2)
    assert machine.calls == ["step", "step", "matmul"] + ["step", "matmul"] * 4
    assert report.step_seconds == Spread(0.5, 0.4375, 0.5625, 0.25, 0.75)
    assert report.matmul_flops.maximum == report.matmul_flops.minimum == 5e12 / 0.02


def test_rates_and_fractions(monkeypatch):
    report = measured(monkeypatch, Machine([0.05], [0.02]), samples=3, warmup=1, sample_seconds=0.05)
    assert report.tokens_per_second == pytest.approx(20_000)
    assert report.achieved_flops == pytest.approx(20_000 * 6e9)
    assert report.datasheet_fraction == pytest.approx(20_000 * 6e9 / (2 * 312e12))
    assert report.matmul_fraction == pytest.approx(20_000 * 6e9 / 2.5e14)


def test_a_drifting_machine_moves_the_paired_fraction_little(monkeypatch):
    speeds = [1.0, 2.0, 4.0, 1.0, 2.0]
    machine = Machine([0.1, *(0.1 * s for s in speeds)], [0.02, *(0.02 * s for s in speeds)])
    report = measured(monkeypatch, machine, samples=5, warmup=1, sample_seconds=0.1)
    assert report.matmul_fractions.minimum == pytest.approx(report.matmul_fractions.maximum)
    assert report.step_seconds.maximum == pytest.approx(4 * report.step_seconds.minimum)


def test_short_steps_are_timed_in_groups(monkeypatch):
    machine = Machine([0.01], [0.02])
    report = measured(monkeypatch, machine, samples=2, warmup=1, sample_seconds=0.05)
    assert machine.calls == ["step", "matmul"] + ["step"] * 5 + ["matmul"] + ["step"] * 5 + ["matmul"]
    assert report.step_seconds.median == pytest.approx(0.01)
    assert report.steps_per_sample == 5


def test_an_unknown_device_is_said_to_be_unknown(monkeypatch):
    report = measured(monkeypatch, Machine([0.1], [0.02], device_kind="cpu", dtype="float32"), samples=2)
    assert report.datasheet_fraction is None
    assert report.as_dict()["datasheet"] is None
    assert dict(report_rows(report))["of datasheet peak (MFU)"] == "n/a: no datasheet figure for float32 on 'cpu'"


def test_the_report_for_machines_is_json_in_si_units(monkeypatch):
    report = measured(monkeypatch, Machine([0.05], [0.02]), samples=3, warmup=1)
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["tokens_per_second"] == pytest.approx(20_000)
    assert values["step_seconds"]["median"] == pytest.approx(0.05)
    assert values["datasheet"]["peak_flops_per_second"] == 624e12
    assert values["datasheet"]["fraction"] == report.datasheet_fraction
    # 20,000 tokens/s of 7.5 GFLOPs, of two devices' 312 TFLOP/s.
    assert values["datasheet"]["hardware_fraction"] == pytest.approx(20_000 * 7.5e9 / 624e12)
    assert values["recomputed_flops_per_token"] == 1.5e9
    assert values["matmul"]["fraction"] == report.matmul_fraction


def test_the_report_for_people(monkeypatch):
    rows = dict(report_rows(measured(monkeypatch, Machine([0.05], [0.02]), samples=3, warmup=1)))
    assert rows["device"] == "2 x NVIDIA A100-SXM4-80GB, computing in bfloat16"
    assert rows["throughput"] == "20,000 tokens/s, 120 TFLOP/s"
    assert rows["of datasheet peak (MFU)"] == "19.2% of 624 TFLOP/s in bfloat16"
    assert rows["with recomputation (HFU)"] == "24.0%"
    assert rows["of measured matmul peak"] == "48.0% of 250 TFLOP/s (best 250 TFLOP/s; 8192 squared)"


@pytest.mark.parametrize(
    ("kind", "dtype", "has_note"),
    [("cpu", "bfloat16", True), ("cpu", "float32", False), ("NVIDIA A100-SXM4-80GB", "bfloat16", False)],
)
def test_fewer_bits_gain_nothing_on_a_cpu(monkeypatch, kind, dtype, has_note):
    rows = dict(report_rows(measured(monkeypatch, Machine([0.1], [0.1], device_kind=kind, dtype=dtype), samples=2)))
    assert ("gains nothing" in rows.get("note", "")) == has_note


@pytest.mark.parametrize("kwargs", [{"samples": 0}, {"warmup": 0}], ids=str)
def test_nothing_to_measure_is_refused(kwargs):
    with pytest.raises(ValueError, match="at least one"):
        measure_mfu(Machine([0.1], [0.1]), Machine([0.1], [0.1]), **kwargs)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_quartiles_agree_with_numpy(count):
    values = list(np.random.default_rng(count).uniform(1, 2, count))
    spread = Spread.from_values(values)
    expected = np.quantile(values, [0.5, 0.25, 0.75])
    np.testing.assert_allclose([spread.median, spread.lower_quartile, spread.upper_quartile], expected)
    assert (spread.minimum, spread.maximum) == (min(values), max(values))
    assert spread.median == statistics.median(values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_counts_what_it_computes(dtype):
    devices = jax.devices()[:2]
    probe = MatmulProbe(devices, dtype, size=64, products=3)
    assert probe.flops == 2 * 64**3 * 3 * 2
    assert probe.run() > 0
    compiled = probe._chain.lower(*probe._operands[0]).compile()
    cost: Any = compiled.cost_analysis()
    assert cost["flops"] == pytest.approx(probe.flops / len(devices), rel=0.05), "conversions may add a little"
    for device, operands in zip(devices, probe._operands, strict=True):
        result = probe._chain(*operands)
        assert result.devices() == {device}
        x, w = (np.asarray(o, np.float64) for o in operands)
        np.testing.assert_allclose(np.asarray(result, np.float64), x @ w @ w @ w, atol=0.1)
        assert 0.5 < np.std(x @ w @ w @ w) < 2
