"""Series of steps: the expected lines in a file of records, as stored in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Plain = dict[str, list[list[int]]]
"""A series as JSON: name of a line -> ranges `[first, last, stride]` of steps."""


class Series:
    """The steps of the lines of a file, by name of the line; small as JSON, for any number of lines.

    The name of a line of metrics is its first metric, such as `train/loss`; texts and histograms have a `name`.
    """

    def __init__(self, plain: Mapping[str, Iterable[Iterable[int]]] | None = None):
        self._ranges = {name: [list(span) for span in ranges] for name, ranges in (plain or {}).items()}

    def add(self, name: str, step: int) -> None:
        """Adds a line; steps of one name do not decrease, and count once. Alerts are not counted: reruns differ."""
        if name == "alert":
            return
        ranges = self._ranges.setdefault(name, [])
        if ranges and step <= ranges[-1][1]:
            return
        if ranges and (step - ranges[-1][1] == ranges[-1][2] or ranges[-1][0] == ranges[-1][1]):
            ranges[-1][1:] = [step, step - ranges[-1][1]]
        else:
            ranges.append([step, step, 1])

    @property
    def names(self) -> list[str]:
        """The names of its lines."""
        return [*self._ranges]

    def steps(self, name: str) -> Iterator[int]:
        """The steps of the lines of a name, in order."""
        for first, last, stride in self._ranges.get(name, []):
            yield from range(first, last + 1, stride)

    def missing_in(self, other: Series) -> dict[str, list[int]]:
        """The lines missing in `other`: steps by name, only names with any."""
        missing = {}
        for name in self._ranges:
            existing = {*other.steps(name)}
            if steps := [step for step in self.steps(name) if step not in existing]:
                missing[name] = steps
        return missing

    def union(self, other: Series) -> Series:
        """The union of the lines of this series and `other`."""
        union = Series()
        for name in {**self._ranges, **other._ranges}:
            for step in sorted({*self.steps(name), *other.steps(name)}):
                union.add(name, step)
        return union

    def to_plain(self) -> Plain:
        """The series as JSON."""
        return {name: [list(span) for span in ranges] for name, ranges in self._ranges.items()}


def line_name(record: Mapping[str, Any]) -> str:
    """The name of a line."""
    named = record.get("name")
    return named if isinstance(named, str) else next((key for key in record if key not in ("step", "time")), "")


def describe_gap(file: Path, run_id: str, step: int, missing: Mapping[str, list[int]]) -> str:
    """A message about missing lines in a file.

    Args:
        file: one of the run's files.
        run_id: the run's name.
        step: step of the checkpoint that remembers the lines.
        missing: steps of the missing lines, by name of the line.
    """
    kinds = (f"{kind} of {format_steps(steps)}" for kind, steps in missing.items())
    return (
        f"{file} lacks lines that were there at the checkpoint of step {step}: {'; '.join(kinds)}. "
        f"`lmt replay {run_id} --metrics` computes them again, but for what your own code logged"
    )


def format_steps(steps: list[int]) -> str:
    """Formats steps for people, such as `12, 20 to 31 and 40`."""
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
