"""Checkpoint policy: the steps at which to save checkpoints, and the checkpoints to keep permanently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt, model_validator

from lm_trainer.core.bucket import storage_path
from lm_trainer.core.config import Config, Duration, LocalPath, PositiveDuration, StorageLocation


class KeepEvery(Config):
    """A range of steps with a permanent checkpoint every `every` steps, up to and including step `until`."""

    every: PositiveInt
    """Number of steps between permanent checkpoints."""
    until: PositiveInt | None = None
    """Last step that this entry covers; null means no limit."""


class MemoryCopiesConfig(Config):
    """Copies of the state in the memory of the machines, from which the run continues after a process is lost."""

    every: PositiveInt
    """Number of steps between copies. The next copy replaces the one before the last."""
    directory: LocalPath = "/dev/shm"
    """Directory in the memory of each machine (tmpfs), for a subdirectory of the user."""


class CheckpointerConfig(Config):
    """Two overlapping policies: temporary checkpoints by time (each replaces the last), and permanent ones by step."""

    base_path: StorageLocation = "checkpoints/"
    """Directory of the checkpoints of all runs, to which the run ID is appended. It may be a gs:// or s3:// URL. In
    that case a copy of the run directory is kept next to the checkpoints."""
    save_interval: Duration = timedelta(minutes=15)
    """Time since the last checkpoint after which a temporary checkpoint is written. The previous temporary checkpoint
    is deleted when the next save begins or the run ends. Until then, a run that resumes can fall back on it if the
    newest checkpoint is damaged, so the disk needs space for two checkpoints."""
    keep: tuple[KeepEvery, ...] = (KeepEvery(every=10_000),)
    """Permanent checkpoints, as consecutive ranges of steps. Only the last entry may omit `until`. If the ranges
    change, checkpoints that were saved as permanent remain until you remove them."""
    append_run_id_to_base_path: bool = True
    """Store the checkpoints in a subdirectory of `base_path` named after the run ID."""
    delete_old_temp_checkpoints: bool = True
    """Delete temporary checkpoints of earlier attempts at this run by the same rule as checkpoints of this attempt."""
    retry_for: PositiveDuration = timedelta(minutes=5)
    """For checkpoints in a bucket: the time after which the run ends if a save cannot be completed."""
    grace_period: PositiveDuration = timedelta(seconds=30)
    """For checkpoints in a bucket: the time available for the last save after a stop signal. Set it to the time from
    the signal until the machine is taken away."""

    host_memory_gb: PositiveFloat | None = None
    """Maximum number of gigabytes (10^9 bytes) of host memory for the copies from which a process writes a checkpoint.
    If its part of the state is larger, training waits until the rest is written. null: a copy of the whole part, so
    training continues at once. A single larger array is copied as a whole."""
    memory: MemoryCopiesConfig | None = None
    """Keep copies of the state in the memory of the machines between checkpoints, each part on two machines. null:
    none."""

    absent: ClassVar[Mapping[str, str]] = {
        "create": "use CheckpointStore(Path(config.expanded_path(run_id)), config) of lm_trainer.checkpoint.store",
    }

    @property
    def host_bytes(self) -> int | None:
        """`host_memory_gb` in bytes."""
        return None if self.host_memory_gb is None else int(self.host_memory_gb * 1e9)

    def expanded_path(self, run_id: str) -> str:
        """Returns the checkpoint directory of a run."""
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
    # Only the first range that covers the step counts, even if a later range would keep the checkpoint.
    for entry in keep:
        if entry.until is None or step <= entry.until:
            return step > 0 and step % entry.every == 0
    return False
