"""Compact series of steps, which checkpoints use to store the expected lines of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Plain = dict[str, list[list[int]]]
"""A series as JSON: list of ranges `[first, last, stride]` of steps (both ends inclusive), by name of the line."""


class Series:
    """The steps of the lines in a file, by name of the line. The JSON form is small for any number of lines.

    The name of a line with metrics is the name of its first metric, such as `train/loss`. Texts and histograms have a
    `name`.
    """

    def __init__(self, plain: Mapping[str, Iterable[Iterable[int]]] | None = None):
        self._ranges = {name: [list(span) for span in ranges] for name, ranges in (plain or {}).items()}

    def add(self, name: str, step: int) -> None:
        """Adds a line. Steps of the same name must not decrease, and a repeated step counts once.

        Alerts are ignored, because they may differ when steps are computed a second time.
        """
        if name == "alert":
            return
        ranges = self._ranges.setdefault(name, [])
        if ranges and step <= ranges[-1][1]:
            return
        if ranges and (step - ranges[-1][1] == ranges[-1][2] or ranges[-1][0] == ranges[-1][1]):
            ranges[-1][1:] = [step, step - ranges[-1][1]]
        else:
            ranges.append([step, step, 1])

    def add_all(self, name: str, steps_L: np.ndarray) -> None:
        """Adds lines with the same name, given their steps in ascending order (integers [L])."""
        strides = np.diff(steps_L)
        is_regular = len(steps_L) > 2 and bool(np.all(strides == strides[0]))
        for step in steps_L[:2] if is_regular else steps_L:
            self.add(name, int(step))
        if is_regular and name in self._ranges:
            # Two steps decide the stride, so the other ones extend the same range.
            first, last, stride = self._ranges[name][-1]
            if last == steps_L[1] and stride == strides[0]:
                self._ranges[name][-1] = [first, int(steps_L[-1]), stride]
            else:
                for step in steps_L[2:]:
                    self.add(name, int(step))

    @property
    def names(self) -> list[str]:
        """Names of the lines."""
        return [*self._ranges]

    def steps(self, name: str) -> Iterator[int]:
        """Yields the steps of the lines with the given name, in ascending order."""
        for first, last, stride in self._ranges.get(name, []):
            yield from range(first, last + 1, stride)

    def missing_in(self, other: Series) -> dict[str, list[int]]:
        """Returns the steps of the lines that are missing in `other`, by name.

        Names without missing lines are left out.
        """
        missing = {}
        for name in self._ranges:
            existing = {*other.steps(name)}
            if steps := [step for step in self.steps(name) if step not in existing]:
                missing[name] = steps
        return missing

    def union(self, other: Series) -> Series:
        """Returns the union of the lines in this series and in `other`."""
        union = Series()
        for name in {**self._ranges, **other._ranges}:
            for step in sorted({*self.steps(name), *other.steps(name)}):
                union.add(name, step)
        return union

    def to_plain(self) -> Plain:
        """Converts the series to JSON-compatible values."""
        return {name: [list(span) for span in ranges] for name, ranges in self._ranges.items()}


def line_name(record: Mapping[str, Any]) -> str:
    """Returns the name of a line."""
    named = record.get("name")
    return named if isinstance(named, str) else next((key for key in record if key not in ("step", "time")), "")


def describe_gap(file: Path, run_id: str, step: int, missing: Mapping[str, list[int]]) -> str:
    """Returns a message about missing lines in a file.

    Args:
        file: one of the run's files.
        run_id: ID of the run.
        step: step of the checkpoint in which the lines were recorded.
        missing: steps of the missing lines, by name of the line.
    """
    kinds = (f"{kind} of {format_steps(steps)}" for kind, steps in missing.items())
    return (
        f"{file} lacks lines that were there at the checkpoint of step {step}: {'; '.join(kinds)}. "
        f"`lmt replay {run_id} --metrics` computes them again, but for what your own code logged"
    )


def format_steps(steps: list[int]) -> str:
    """Formats a list of steps as text, such as `12, 20 to 31 and 40`."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    shown = [f"{first} to {last}" if last > first else str(first) for first, last in spans[:6]]
    if len(spans) > 6:
        shown.append(f"{len(spans) - 6} more ranges")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
