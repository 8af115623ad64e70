"""Formats the results of a run as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.agreement import STEPS, Trace, largest_loss_difference
from benchmarks.peers.kinds import KINDS
from benchmarks.peers.process import Steps, worker_environment
from benchmarks.peers.shapes import Shape
from benchmarks.setting import describe_setting, markdown_table

REFERENCE = "lmt"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "levanter")


@dataclass(frozen=True)
class Results:
    """The measurements of one run."""

    shape: Shape
    device: str
    command: str
    turns: Mapping[str, Sequence[Steps]]
    """Steps of each kind, with one entry per turn."""
    products: Sequence[float]
    """Rate of the matrix product in operations per second, in each turn."""
    traces: Mapping[str, Trace]
    flops_per_token: float
    parameters: int
    missing: Mapping[str, str]
    """Kinds that were left out, with the reasons."""
    other_cores: float | None
    """Number of cores that other processes used during the turns; None if the system does not report it."""
    load: str
    """Load of the machine before the measurement."""

    def wall_seconds(self, kind: str) -> list[float]:
        """Returns the wall seconds per step in each turn."""
        return [statistics.mean(steps.wall) for steps in self.turns[kind]]

    def cpu_seconds(self, kind: str) -> list[float]:
        """Returns the CPU seconds per step in each turn."""
        return [statistics.mean(steps.cpu) for steps in self.turns[kind]]

    def setting(self) -> str:
        return describe_setting(*(package for package in _PACKAGES if package not in self.missing))

    def idle_share(self) -> float:
        """CPU seconds of the waiting processes per CPU second of the working process."""
        turns = [steps for kind_turns in self.turns.values() for steps in kind_turns]
        return sum(steps.idle for steps in turns) / sum(sum(steps.cpu) for steps in turns)

    def as_json(self) -> dict[str, Any]:
        """Returns all raw data."""
        return {
            "command": self.command,
            "setting": self.setting(),
            "load": self.load,
            "shape": vars(self.shape),
            "device": self.device,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "turns": {kind: [steps._asdict() for steps in kind_turns] for kind, kind_turns in self.turns.items()},
            "matmul_flops_per_second": list(self.products),
            "first_steps": {kind: trace._asdict() for kind, trace in self.traces.items()},
            "missing": dict(self.missing),
            "cpu_seconds_a_second_of_others": self.other_cores,
        }


def report(results: Results) -> Iterator[str]:
    """Yields the lines of the report."""
    yield "# One training step of lmt and its peers"
    yield ""
    yield from _caption(results)
    yield ""
    yield _steps_table(results)
    bases = [kind for kind in results.turns if KINDS[kind].module != "lmt_step"]
    if bases:
        yield ""
        yield "A step's time by that of a step of the kind in the column, median over the turns:"
        yield ""
        yield _ratio_table(results, bases, {kind: results.wall_seconds(kind) for kind in results.turns})
        if results.device == "cpu":
            yield ""
            yield "The same by CPU seconds, of all threads together:"
            yield ""
            yield _ratio_table(results, bases, {kind: results.cpu_seconds(kind) for kind in results.turns})


def _caption(results: Results) -> Iterator[str]:
    shape = results.shape
    precision = "float32" if results.device == "cpu" else "bfloat16 products, float32 weights"
    yield f"`{results.command}`: {results.setting()}"
    yield (
        f"{shape.describe()}; {results.parameters / 1e6:.1f} M parameters, {precision}, AdamW, no dropout, nothing "
        f"recomputed. `lmt` cuts the rows into {shape.elastic_shards} microbatches, `lmt fast` does not."
    )
    turns = len(next(iter(results.turns.values())))
    steps = len(next(iter(results.turns.values()))[0].wall)
    yield (
        f"{_format_count(turns, 'turn')} of {_format_count(steps, 'step')} of each kind, each in a process of its own, "
        f"one after the other, in reversed order every other turn. All start from the same weights and read the same "
        f"batches; in the first {STEPS} steps no loss is further than "
        f"{largest_loss_difference(results.traces, REFERENCE):.1e} from that of "
        f"`{REFERENCE}`. OMP_WAIT_POLICY is {worker_environment()['OMP_WAIT_POLICY'].lower()}."
    )
    rate = statistics.median(results.products)
    yield (
        f"A product of large matrices in XLA reached {rate / 1e9:,.1f} GFLOP/s in the same turns; the column of its "
        f"share counts {results.flops_per_token / 1e6:,.1f} MFLOP for a token, forward and backward."
    )
    usage = (
        ""
        if results.other_cores is None
        else f" Other processes used {results.other_cores:.2f} cores during the turns,"
    )
    waiting = f"{100 * results.idle_share():.2f} % of what the working one used."
    yield f"{results.load}{usage or ' During the turns'} {'and ' if usage else ''}the waiting workers {waiting}"
    for kind, reason in results.missing.items():
        yield f"`{kind}` was left out: {reason}."


def _steps_table(results: Results) -> str:
    shape, rate = results.shape, statistics.median(results.products)
    work = results.flops_per_token * shape.tokens
    rows = []
    for kind, turns in results.turns.items():
        wall, cpu = results.wall_seconds(kind), results.cpu_seconds(kind)
        median, cpu_median = statistics.median(wall), statistics.median(cpu)
        low, high = _quartiles(wall)
        rows.append(
            [
                kind,
                f"{1e3 * median:,.1f}",
                f"{1e3 * low:,.1f} to {1e3 * high:,.1f}",
                f"{shape.tokens / median:,.0f}",
                f"{cpu_median:.3f}",
                f"{shape.tokens / cpu_median:,.0f}",
                f"{100 * work / median / rate:.0f} %",
                f"{max(steps.peak for steps in turns) / 2**20:,.0f}",
            ]
        )
    heads = ["kind", "ms a step", "quartiles", "tokens/s", "CPU s a step", "tokens per CPU s", "of the product's rate"]
    return markdown_table([*heads, "peak MiB"], rows)


def _ratio_table(results: Results, bases: Sequence[str], times: Mapping[str, Sequence[float]]) -> str:
    rows = [[kind, *(f"{_median_ratio(times[kind], times[base]):.2f}" for base in bases)] for kind in results.turns]
    return markdown_table(["kind", *(f"/ {base}" for base in bases)], rows)


def _median_ratio(times: Sequence[float], base_times: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, base_times, strict=True))


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high
