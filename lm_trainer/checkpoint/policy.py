"""Checkpoint policy: the steps to save, and the ones to keep permanently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

from pydantic import PositiveInt, model_validator

from lm_trainer.core.bucket import storage_path
from lm_trainer.core.config import Config, Duration, PositiveDuration, StorageLocation


class KeepEvery(Config):
    """Permanent checkpoints: one every `every` steps, up to step `until`."""

    every: PositiveInt
    """Steps between permanent checkpoints."""
    until: PositiveInt | None = None
    """The last step covered by this entry; null means no limit."""


class CheckpointerConfig(Config):
    """Two overlapping policies: by time (temporary, replaced by the next) and by step (permanent)."""

    base_path: StorageLocation = "checkpoints/"
    """Directory of the checkpoints of all runs; the run ID is appended. May be a gs:// or s3:// URL; then a copy of the
    run directory is kept next to the checkpoints."""
    save_interval: Duration = timedelta(minutes=15)
    """Time since the last checkpoint after which a temporary checkpoint is written. The previous temporary checkpoint
    is deleted when the next save begins or the run ends. Until then a resume can fall back on it if the newest is
    damaged, so the disk needs space for two."""
    keep: tuple[KeepEvery, ...] = (KeepEvery(every=10_000),)
    """Permanent checkpoints, as consecutive ranges of steps; only the last entry may lack `until`. A checkpoint saved
    as permanent remains when the ranges change, until you remove it."""
    append_run_id_to_base_path: bool = True
    """Store the checkpoints in a subdirectory of `base_path` named after the run ID."""
    delete_old_temp_checkpoints: bool = True
    """Delete temporary checkpoints of earlier attempts at this run by the same rule as new ones."""
    retry_for: PositiveDuration = timedelta(minutes=5)
    """For checkpoints in a bucket: the time after which a save that cannot be completed ends the run."""
    grace_period: PositiveDuration = timedelta(seconds=30)
    """For checkpoints in a bucket: the time available for the last save after a stop signal. Set it to the time between
    the signal and the loss of the machine."""

    absent: ClassVar[Mapping[str, str]] = {
        "create": "use CheckpointStore(Path(config.expanded_path(run_id)), config) of lm_trainer.checkpoint.store",
    }

    def expanded_path(self, run_id: str) -> str:
        """Returns the directory of the checkpoints of a run."""
        base = storage_path(self.base_path)
        return str(base / run_id if self.append_run_id_to_base_path else base)

    @model_validator(mode="after")
    def _keep_is_ordered(self) -> CheckpointerConfig:
        for earlier, later in zip(self.keep, self.keep[1:], strict=False):
            if earlier.until is None:
                raise ValueError("keep: only the last entry may lack `until`")
            if later.until is not None and later.until <= earlier.until:
                raise ValueError(f"keep: `until` must grow from entry to entry, got {earlier.until}, {later.until}")
        return self


def is_permanent(step: int, keep: Sequence[KeepEvery]) -> bool:
    """Returns True if the step policy keeps the checkpoint of `step` permanently."""
    # Only the first range covering the step counts, even if a later one would keep it too.
    for entry in keep:
        if entry.until is None or step <= entry.until:
            return step > 0 and step % entry.every == 0
    return False
