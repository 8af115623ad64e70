"""Finds lost metrics of a run: lines that its newest checkpoint records, but that are missing from its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.checkpoint.store import CheckpointError, list_steps, read_record
from lm_trainer.core.bucket import StoragePath
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.records import RUN, read_run_record
from lm_trainer.run.training.checkpoints import SERIES
from lm_trainer.trackers.metric_columns import read_metric_columns
from lm_trainer.trackers.series import Series, describe_gap

Missing = dict[str, dict[str, list[int]]]
"""Steps of the missing lines, by file name and by name of the line."""


@dataclass(frozen=True)
class LostMetrics:
    """The missing lines of a run."""

    step: int
    """Step of the newest checkpoint, which records the lines."""
    lines: Missing

    def describe_by_file(self, path: Path, run_id: str) -> list[str]:
        """Returns one message for each file with missing lines in the run directory `path`."""
        return [describe_gap(path / file, run_id, self.step, names) for file, names in self.lines.items()]


def find_lost_metrics(
    path: Path, checkpoints: StoragePath, read: Mapping[str, Series] | None = None
) -> LostMetrics | None:
    """Compares the files in a run directory with the lines that the newest checkpoint records.

    Args:
        path: the run directory.
        checkpoints: the checkpoint directory of the run.
        read: lines of files that the caller has already read, by file name.

    Returns:
        The missing lines; None if there is no checkpoint, or if the newest one is not readable or records no lines.
    """
    saved = list_steps(checkpoints)
    try:
        series = read_record(checkpoints, saved[-1]).get(SERIES) if saved else None
    except CheckpointError:
        return None
    branch = BranchPoint.from_record(read_run_record(path), path / RUN)
    # The lines of the steps that a branch shares are in the directory of its parent.
    if series is None or (branch is not None and branch.step == saved[-1]):
        return None
    missing = {}
    for name, expected in series.items():
        present = (read or {}).get(name) or read_metric_columns(path / name).series
        if missing_lines := Series(expected).missing_in(present):
            missing[name] = missing_lines
    return LostMetrics(saved[-1], missing)
