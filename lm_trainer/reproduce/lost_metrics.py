"""Finds metrics of a run that were lost or changed: checkpoints record which lines there were, and hash the losses."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lm_trainer.checkpoint.store import CheckpointError, list_steps, read_record
from lm_trainer.core.bucket import StoragePath
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.fingerprint import extend_chain
from lm_trainer.run.files.records import RUN, read_run_record
from lm_trainer.run.training.checkpoints import SERIES
from lm_trainer.trackers.json_lines import METRICS
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


@dataclass(frozen=True)
class ChangedMetrics:
    """Steps among whose losses and gradient norms at least one is not what the run logged."""

    first: int
    last: int

    def describe(self, path: Path, run_id: str) -> str:
        """Returns a message about the file in the run directory `path`."""
        return (
            f"{path / METRICS}: a loss or gradient norm of the steps {self.first} to {self.last} is not what the run "
            f"logged. Put back a copy, or remove the lines of these steps: `lmt replay {run_id} --metrics` computes "
            f"them again"
        )


def find_changed_metrics(record: RunRecord) -> ChangedMetrics | None:
    """Compares the losses and gradient norms with their hashes in the checkpoints.

    Returns None if they are equal, or cannot be compared, because not every step is logged.
    """
    hashes = {step: record.read_checkpoint(step).get("chain") for step in record.checkpoint_steps()}
    last_equal, chain = record.start, record.first_chain
    for step in range(record.start + 1, max(hashes, default=0) + 1):
        metrics = record.computed.get(step, {})
        if not metrics.keys() >= {"train/loss", "optim/grad_norm"} or not record.covers_all_steps:
            return None
        try:
            chain = extend_chain(chain, step, metrics["train/loss"], metrics["optim/grad_norm"])
        except (OverflowError, TypeError, struct.error):
            # The value is no number of 32 bits.
            chain = "changed"
        if hashes.get(step) not in (None, chain):
            return ChangedMetrics(last_equal + 1, step)
        last_equal = step if step in hashes else last_equal
    return None
