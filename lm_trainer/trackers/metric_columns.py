"""Reads a long metrics.jsonl by columns: arrays of steps and values instead of one dict per line.

Shape letters: N is the number of lines of a metric, L the number of lines with the same keys, K the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.trackers.json_lines import decode_non_finite, read_record_blocks
from lm_trainer.trackers.series import Series, line_name

_NO_METRICS = ("step", "time")

Record = dict[str, Any]


@dataclass
class MetricColumns:
    """The lines of a file, with their metrics as columns."""

    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Ascending steps (int64 [N]) and values (float64 [N]) of each metric, by name. If a step was logged repeatedly,
    the last value counts."""
    other_lines: list[Record] = field(default_factory=list)
    """Lines with values that are no numbers, such as alerts and fingerprints, in the order of the file."""
    last_step: int = 0
    """Largest step of a line; 0 if there are no lines."""
    series: Series = field(default_factory=Series)
    """Steps of all lines, by name of the line."""


def read_metric_columns(file: Path) -> MetricColumns:
    """Reads a file with one JSON object per line, such as metrics.jsonl. Skips lines that are not whole.

    The file may be read at any time while the run is in progress. Returns no curves if the file does not exist.
    """
    columns, pieces, count = MetricColumns(), _Pieces(), 0
    for records in read_record_blocks(file):
        steps_by_name: dict[str, list[np.ndarray]] = {}
        for numbers in _group_by_keys(records).values():
            lines = [records[number] for number in numbers]
            steps_L = np.array([line["step"] for line in lines], np.int64)
            numbers_L, values_LK = np.array(numbers) + count, _as_numbers(lines)
            if values_LK is None:
                columns.other_lines += [{name: decode_non_finite(value) for name, value in x.items()} for x in lines]
                pieces.add_lines(numbers_L, lines)
            else:
                pieces.add_columns(numbers_L, steps_L, [*lines[0]], values_LK)
            # Lines of metrics are named by their first key, all other lines by a value.
            for line, steps in (
                zip(lines, steps_L[:, None], strict=True) if "name" in lines[0] else [(lines[0], steps_L)]
            ):
                steps_by_name.setdefault(line_name(line), []).append(steps)
            columns.last_step = max(columns.last_step, int(steps_L.max()))
        for name, steps in steps_by_name.items():
            columns.series.add_all(name, np.unique(np.concatenate(steps)))
        count += len(records)
    columns.curves = pieces.join()
    return columns


class _Pieces:
    """Pieces of the columns: the numbers of lines in the file, and their steps and values, by name of the metric."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def add_columns(
        self, numbers_L: np.ndarray, steps_L: np.ndarray, keys: Sequence[str], values_LK: np.ndarray
    ) -> None:
        """Adds lines that consist of numbers."""
        for index, name in enumerate(keys):
            if name not in _NO_METRICS:
                # A copy, so that the matrix can be freed.
                self._pieces.setdefault(name, []).append((numbers_L, steps_L, values_LK[:, index].copy()))

    def add_lines(self, numbers_L: np.ndarray, lines: Sequence[Record]) -> None:
        """Adds the numbers of lines that contain other values too."""
        for number, line in zip(numbers_L, lines, strict=True):
            for name, text in line.items():
                value = decode_non_finite(text)
                if name not in _NO_METRICS and isinstance(value, int | float):
                    piece = np.array([number]), np.array([line["step"]]), np.array([value], np.float64)
                    self._pieces.setdefault(name, []).append(piece)

    def join(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns the steps and values of each metric, sorted by step."""
        curves, orders = {}, dict[tuple[int, ...], tuple[np.ndarray, np.ndarray | None]]()
        # Pieces are removed as they are joined, so that both forms of all metrics are never held together.
        for name in [*self._pieces]:
            numbers, steps, values = zip(*self._pieces.pop(name), strict=True)
            # Metrics with the same lines have the same arrays of numbers, and share their steps.
            lines = tuple(map(id, numbers))
            if lines not in orders:
                orders[lines] = _order_by_step(np.concatenate(numbers), np.concatenate(steps))
            steps_N, order_N = orders[lines]
            values_N = np.concatenate(values)
            curves[name] = steps_N, values_N if order_N is None else values_N[order_N]
        return curves


def _order_by_step(numbers_N: np.ndarray, steps_N: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the ascending steps of lines, and for each step the position of its line with the highest number.

    The positions are None if the lines are in order, and each step has one line.
    """
    if np.all(steps_N[1:] > steps_N[:-1]):
        return steps_N, None
    order = np.lexsort((numbers_N, steps_N))
    is_last = np.append(np.diff(steps_N[order]) != 0, True)
    return steps_N[order][is_last], order[is_last]


def _group_by_keys(records: Sequence[Record]) -> dict[tuple[str, ...], list[int]]:
    """Returns the indices of the records that have the same keys."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault(tuple(record), []).append(index)
    return groups


def _as_numbers(lines: list[Record]) -> np.ndarray | None:
    """Returns the values of lines with the same keys, float64 [L, K]; None if some are no numbers."""
    first = lines[0]
    if any(isinstance(decode_non_finite(value), str | list | dict | None) for value in first.values()):
        return None
    try:
        # NumPy reads the texts NaN, Infinity and -Infinity as numbers.
        return np.array([[*line.values()] for line in lines], np.float64)
    except (ValueError, TypeError):
        return None
