"""Measurement of `lmt bench mfu`: the speed of a training step relative to two peaks.

Steps and chains of matrix products are timed alternately, so that changes in the speed of the machine affect both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lm_trainer.profile.peaks import Peak, datasheet_peak
from lm_trainer.profile.timing import Spread, format_si


class Workload(Protocol):
    """A training step to measure."""

    @property
    def run_step(self) -> Callable[[], None]:
        """Runs one full training step, and returns when its result is available."""
        ...

    @property
    def tokens_per_step(self) -> float: ...

    @property
    def flops_per_token(self) -> float:
        """Number of FLOPs per token of a training step, forward and backward."""
        ...

    @property
    def recomputed_flops_per_token(self) -> float:
        """Number of FLOPs per token that rematerialisation adds."""
        ...

    @property
    def device_kind(self) -> str: ...

    @property
    def device_count(self) -> int: ...

    @property
    def dtype(self) -> str:
        """Compute dtype of the matrix products."""
        ...

    @property
    def num_params(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class Probe(Protocol):
    """A peak that is measured; see `lm_trainer.profile.matmul.MatmulProbe`."""

    @property
    def flops(self) -> float:
        """Number of FLOPs of one run, over all devices."""
        ...

    @property
    def size(self) -> int: ...

    def run(self) -> float:
        """Runs once and returns the time in seconds."""
        ...


@dataclass(frozen=True)
class MfuReport:
    """Measurements, with rates and fractions that are computed from the medians."""

    workload: Workload
    step_seconds: Spread
    matmul_flops: Spread
    """FLOP/s of the probe, over all devices."""
    matmul_fractions: Spread
    """Achieved FLOP/s of each step over the FLOP/s of the probe run next to it."""
    matmul_size: int
    samples: int
    steps_per_sample: int
    warmup: int
    peak: Peak | None
    """Peak of one device; None if no datasheet has a figure."""

    @property
    def tokens_per_second(self) -> float:
        return self.workload.tokens_per_step / self.step_seconds.median

    @property
    def achieved_flops(self) -> float:
        """Achieved model FLOP/s, over all devices."""
        return self.tokens_per_second * self.workload.flops_per_token

    @property
    def datasheet_fraction(self) -> float | None:
        """MFU: achieved FLOP/s over the datasheet peak of all devices."""
        return None if self.peak is None else self.achieved_flops / (self.peak.flops * self.workload.device_count)

    @property
    def hardware_fraction(self) -> float | None:
        """HFU: like MFU, but including recomputation by rematerialisation."""
        work, mfu = self.workload, self.datasheet_fraction
        return None if mfu is None else mfu * (1 + work.recomputed_flops_per_token / work.flops_per_token)

    @property
    def matmul_fraction(self) -> float:
        """Achieved FLOP/s over the median FLOP/s of the probe."""
        return self.achieved_flops / self.matmul_flops.median

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values in SI units for `--json`. Names are stable."""
        work, peak = self.workload, self.peak
        return {
            "device_kind": work.device_kind,
            "device_count": work.device_count,
            "dtype": work.dtype,
            "num_params": work.num_params,
            "vocab_size": work.vocab_size,
            "tokens_per_step": work.tokens_per_step,
            "flops_per_token": work.flops_per_token,
            "recomputed_flops_per_token": work.recomputed_flops_per_token,
            "samples": self.samples,
            "steps_per_sample": self.steps_per_sample,
            "warmup_steps": self.warmup,
            "step_seconds": self.step_seconds.as_dict(),
            "tokens_per_second": self.tokens_per_second,
            "achieved_flops_per_second": self.achieved_flops,
            "datasheet": peak
            and {
                "peak_flops_per_second": peak.flops * work.device_count,
                "format": peak.format,
                "source": peak.source,
                "fraction": self.datasheet_fraction,
                "hardware_fraction": self.hardware_fraction,
            },
            "matmul": {
                "size": self.matmul_size,
                "flops_per_second": self.matmul_flops.as_dict(),
                "fraction": self.matmul_fraction,
                "paired_fraction": self.matmul_fractions.as_dict(),
            },
        }


def measure_mfu(
    workload: Workload,
    probe: Probe,
    *,
    samples: int = 20,
    warmup: int = 3,
    sample_seconds: float = 0.1,
) -> MfuReport:
    """Times training steps and the probe alternately.

    Args:
        workload: the training step to measure.
        probe: the peak to compare with, on the same devices.
        samples: number of timings of each of them.
        warmup: number of untimed steps at the start; the first of them compiles.
        sample_seconds: shorter steps are timed in groups of about this duration.

    Raises:
        ValueError: if there are fewer than one sample or fewer than one warm-up step.
    """
    if samples < 1 or warmup < 1:
        raise ValueError(f"expected at least one sample and one warm-up step, got {samples} and {warmup}")
    # The last warm-up step does not compile, so its time determines the number of steps per sample.
    last = [_time_per_step(workload.run_step, 1) for _ in range(warmup)][-1]
    # Timings of single steps of a millisecond would be dominated by noise of the clock and the scheduler.
    steps = max(1, round(sample_seconds / max(last, 1e-9)))
    seconds, matmul = [], []
    # An untimed run warms up the caches and the clock rates.
    probe.run()
    for _ in range(samples):
        seconds.append(_time_per_step(workload.run_step, steps))
        matmul.append(probe.flops / probe.run())
    flops_per_step = workload.flops_per_token * workload.tokens_per_step
    return MfuReport(
        workload=workload,
        step_seconds=Spread.from_values(seconds),
        matmul_flops=Spread.from_values(matmul),
        matmul_fractions=Spread.from_values([flops_per_step / s / m for s, m in zip(seconds, matmul, strict=True)]),
        matmul_size=probe.size,
        samples=samples,
        steps_per_sample=steps,
        warmup=warmup,
        peak=datasheet_peak(workload.device_kind, workload.dtype),
    )


def report_rows(report: MfuReport) -> list[tuple[str, str]]:
    """Returns names and values of the report for display."""
    work, step, matmul, paired = report.workload, report.step_seconds, report.matmul_flops, report.matmul_fractions
    grouped = f", each of {report.steps_per_sample} steps" if report.steps_per_sample > 1 else ""
    if report.peak is None:
        datasheet = hardware = f"n/a: no datasheet figure for {work.dtype} on {work.device_kind!r}"
    else:
        total = report.peak.flops * work.device_count
        datasheet = f"{report.datasheet_fraction:.1%} of {format_si(total)}FLOP/s in {report.peak.format}"
        hardware = f"{report.hardware_fraction:.1%}"
    model = f"{work.num_params:,} parameters with a vocabulary of {work.vocab_size:,}"
    note = f"on a CPU XLA computes a model's products in float32: {work.dtype} gains nothing there"
    return [
        *([("note", note)] if work.device_kind == "cpu" and work.dtype != "float32" else []),
        ("device", f"{work.device_count} x {work.device_kind}, computing in {work.dtype}"),
        ("model", f"{model}, {work.flops_per_token:,.0f} FLOPs/token"),
        ("step", f"{work.tokens_per_step:,.0f} tokens, {format_si(work.flops_per_token * work.tokens_per_step)}FLOPs"),
        ("timed", f"{report.samples} samples{grouped}, each beside a matrix product; {report.warmup} steps before"),
        ("step time", step.format_milliseconds()),
        ("throughput", f"{report.tokens_per_second:,.0f} tokens/s, {format_si(report.achieved_flops)}FLOP/s"),
        ("of datasheet peak (MFU)", datasheet),
        ("with recomputation (HFU)", hardware),
        ("of measured matmul peak", f"{report.matmul_fraction:.1%} of {format_si(matmul.median)}FLOP/s "
                                    f"(best {format_si(matmul.maximum)}FLOP/s; {report.matmul_size} squared)"),
        ("same, sample by sample", f"median {paired.median:.1%}, quartiles {paired.lower_quartile:.1%}-"
                                   f"{paired.upper_quartile:.1%}"),
    ]  # fmt: skip


def _time_per_step(run_step: Callable[[], None], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        run_step()
    return (time.perf_counter() - started) / steps
