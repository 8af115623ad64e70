"""Goodput: fraction of a run's wall time that is spent on steps that are part of its final state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOODPUT, WALL_TIME = "throughput/goodput", "throughput/wall_time"
"""Names of metrics: a fraction from 0 to 1, and seconds over all attempts."""

_CHUNK = 1 << 16


class Goodput:
    """Adds up the time of a run over all of its attempts.

    Productive time is the time of the steps, without waiting for data, in the attempts that led to the current state:
    steps that are recomputed after a resume count once. Everything else (start-up, compilation, evaluation, blocking
    saves, lost steps) counts only as wall time. Time between two attempts counts as neither, nor does the time of a
    killed attempt after its last recorded step.

    Args:
        productive: time in seconds of the steps before this attempt.
        spent: wall time in seconds of earlier attempts.
        started: clock time at which this attempt started.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, productive: float, spent: float, started: float, clock: Callable[[], float] = time.perf_counter):
        self._productive, self._spent, self._started, self._clock = productive, spent, started, clock

    @classmethod
    def resume(cls, metrics: Path, step: int, started: float) -> Goodput:
        """Continues from the lines of a run's metrics.jsonl. Must be called before lines after `step` are dropped.

        Args:
            metrics: path of the file, which may not exist.
            step: the step at which this attempt starts.
            started: the value of `time.perf_counter` at the start of this attempt.
        """
        productive = spent = 0.0
        for line in _lines_backwards(metrics) if step else ():
            if WALL_TIME not in line:
                continue
            spent = max(spent, line[WALL_TIME])
            if line["step"] <= step:
                productive = line[GOODPUT] * line[WALL_TIME]
                break
        return cls(productive, spent, started)

    def record_step(self, seconds: float) -> dict[str, float]:
        """Records a finished step.

        Args:
            seconds: time of the step without waiting for data; 0 for a step whose time was not measured.

        Returns:
            `throughput/goodput` and `throughput/wall_time`.
        """
        self._productive += seconds
        wall = self._spent + self._clock() - self._started
        return {GOODPUT: min(self._productive / wall, 1.0) if wall > 0 else 0.0, WALL_TIME: wall}


def _lines_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete records of a JSON lines file, from last to first, reading lazily."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        position, head = file.seek(0, 2), b""
        while position > 0:
            size = min(_CHUNK, position)
            position -= size
            file.seek(position)
            lines = (file.read(size) + head).split(b"\n")
            # The first line may start in the preceding chunk.
            head = lines[0]
            yield from filter(None, map(_parse_record, reversed(lines[1:])))
        if (first := _parse_record(head)) is not None:
            yield first


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
