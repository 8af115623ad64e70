"""Goodput: the share of a run's wall time that went into steps which the run has kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOODPUT, WALL_TIME = "throughput/goodput", "throughput/wall_time"
"""Names of the metrics: a share from 0 to 1, and seconds over all attempts."""

_CHUNK = 1 << 16


class Goodput:
    """Adds up the seconds of a run over all of its attempts.

    Kept time is that of steps, without waiting for their data, in the line of attempts that led here: steps that a
    resume computes again count once. All else (start-up, compilation, evaluation, saves that block, lost steps) is in
    the wall time alone. Time between two attempts is in neither, nor what an attempt that was killed spent after the
    last step that it recorded.

    Args:
        kept: seconds of the steps up to where this attempt begins.
        spent: seconds of the attempts before.
        started: when this attempt began, by the clock.
        clock: seconds that only grow.
    """

    def __init__(self, kept: float, spent: float, started: float, clock: Callable[[], float] = time.perf_counter):
        self._kept, self._spent, self._started, self._clock = kept, spent, started, clock

    @classmethod
    def resume(cls, metrics: Path, step: int, started: float) -> Goodput:
        """Goes on from the lines of a run's metrics.jsonl; call it before those after `step` are dropped.

        Args:
            metrics: the file, which need not be there.
            step: at which this attempt begins.
            started: when it began, by `time.perf_counter`.
        """
        kept = spent = 0.0
        for line in _lines_backwards(metrics) if step else ():
            if WALL_TIME not in line:
                continue
            spent = max(spent, line[WALL_TIME])
            if line["step"] <= step:
                kept = line[GOODPUT] * line[WALL_TIME]
                break
        return cls(kept, spent, started)

    def step(self, seconds: float) -> dict[str, float]:
        """Takes a step that was done.

        Args:
            seconds: of the step, without waiting; 0 for one that has no time of its own.

        Returns:
            `throughput/goodput` and `throughput/wall_time`.
        """
        self._kept += seconds
        wall = self._spent + self._clock() - self._started
        return {GOODPUT: min(self._kept / wall, 1.0) if wall > 0 else 0.0, WALL_TIME: wall}


def _lines_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a file of JSON lines, the last one first, without reading more of it than is asked for."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        at, rest = file.seek(0, 2), b""
        while at > 0:
            size = min(_CHUNK, at)
            at -= size
            file.seek(at)
            lines = (file.read(size) + rest).split(b"\n")
            # The first one may begin in the chunk before.
            rest = lines[0]
            yield from filter(None, map(_record, reversed(lines[1:])))
        if (first := _record(rest)) is not None:
            yield first


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None
