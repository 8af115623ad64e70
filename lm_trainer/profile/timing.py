"""Interleaved timings of functions, so that changes in the speed of the machine affect all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Summary statistics of positive numbers."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    maximum: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """Computes the statistics of one or more values."""
        # Inclusive, so that the quartiles of few values stay within their range.
        lower, median, upper = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
        )
        return cls(median, lower, upper, min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def format_milliseconds(self) -> str:
        """Formats a `Spread` of seconds: `12.3 ms (quartiles 11.9-13.0, range 11.2-15.1)`."""
        median, low, high, minimum, maximum = (
            f"{1e3 * value:.{1 if value < 10 else 0}f}" for value in vars(self).values()
        )
        return f"{median} ms (quartiles {low}-{high}, range {minimum}-{maximum})"


@dataclass(frozen=True)
class BenchResult:
    """The result of a bench command."""

    rows: list[tuple[str, str]]
    """Names and values for display."""
    values: dict[str, Any]
    """Plain values in SI units for `--json`; names are stable."""


def align_rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns lines of names and values in which the values are aligned."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def time_call(run: Callable[[], object]) -> float:
    """Returns the duration of one call in seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure_interleaved(
    runs: Mapping[str, Callable[[], float]], repeats: int, *, on_turn: Callable[[int], object] = lambda _: None
) -> dict[str, list[float]]:
    """Measures each of `runs` `repeats` times, in rounds. Every other round runs in reverse order.

    Args:
        runs: name -> a function that measures once.
        repeats: number of rounds, at least one.
        on_turn: called before each round with the index of the round, from 0.
    """
    results: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(repeats):
        on_turn(round_index)
        # Alternating order, so that no function is always measured right after the same other function.
        for name in list(runs)[:: -1 if round_index % 2 else 1]:
            results[name].append(runs[name]())
    return results


def format_si(value: float) -> str:
    """Formats a number with three digits and an SI prefix: `1.23 T`."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def format_mebibytes(count: float) -> str:
    """Formats a number of bytes: `12.3 MiB`."""
    return f"{count / 2**20:,.1f} MiB"
