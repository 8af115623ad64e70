"""Metrics that a run has lost: lines that its newest checkpoint remembers and its directory lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lm_trainer.checkpoint.store import CheckpointError, committed_steps, read_record
from lm_trainer.core.bucket import StoragePath
from lm_trainer.run.training.checkpoints import SERIES
from lm_trainer.trackers.json_lines import parse
from lm_trainer.trackers.series import Series, describe_gap, line_name

Missing = dict[str, dict[str, list[int]]]
"""File -> name of the line -> steps."""


@dataclass(frozen=True)
class LostMetrics:
    """The lines that a run lacks."""

    step: int
    """The step of its newest checkpoint, which remembers them."""
    lines: Missing

    def named(self, path: Path, run_id: str) -> list[str]:
        """A line for people about each file of the run directory `path`."""
        return [describe_gap(path / file, run_id, self.step, names) for file, names in self.lines.items()]


def lost_lines(path: Path, checkpoints: StoragePath) -> LostMetrics | None:
    """Compares the files of a run directory with what the newest checkpoint remembers of them.

    Returns:
        None where no checkpoint can be read, or it is of an older version and remembers nothing.
    """
    saved = committed_steps(checkpoints)
    try:
        series = read_record(checkpoints, saved[-1]).get(SERIES) if saved else None
    except CheckpointError:
        return None
    if series is None:
        return None
    missing = {}
    for name, expected in series.items():
        file, there = path / name, Series()
        for line, _ in parse(file.read_bytes())[0] if file.is_file() else []:
            if line["step"] <= saved[-1]:
                there.add(line_name(line), line["step"])
        if lacks := Series(expected).without(there):
            missing[name] = lacks
    return LostMetrics(saved[-1], missing)
