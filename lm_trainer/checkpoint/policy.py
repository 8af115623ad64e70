"""Policy of checkpoints: the steps that are saved, and those of them that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

from pydantic import PositiveInt, model_validator

from lm_trainer.core.bucket import storage_path
from lm_trainer.core.config import Config, Duration, PlacePath, PositiveDuration


class KeepEvery(Config):
    """Permanent checkpoints: one `every` so many steps, `until` a step."""

    every: PositiveInt
    """Steps between permanent checkpoints."""
    until: PositiveInt | None = None
    """The last step that this entry covers; null: for ever."""


class CheckpointerConfig(Config):
    """Two overlapping policies: by time (temporary, replaced by the next) and by step (permanent)."""

    base_path: PlacePath = "checkpoints/"
    """Directory of the checkpoints of all runs; the run's id is appended. It may be a URL of gs:// or s3://, beside
    whose checkpoints a copy of the run directory is kept."""
    save_interval: Duration = timedelta(minutes=15)
    """A temporary checkpoint is written when so much time has passed since the last checkpoint. The one before the
    newest is deleted when the next save begins, or at the end of the run: until then it is what a resume falls back on
    if the newest is damaged, so the disk needs room for two."""
    keep: tuple[KeepEvery, ...] = (KeepEvery(every=10_000),)
    """Permanent checkpoints, as consecutive ranges of steps; only the last entry may lack `until`. One that
    was saved as permanent stays when the ranges change, until you remove it."""
    append_run_id_to_base_path: bool = True
    """Put the checkpoints into a directory of `base_path` that is named after the run."""
    delete_old_temp_checkpoints: bool = True
    """Delete temporary checkpoints of earlier attempts at this run like those of this one."""
    retry_for: PositiveDuration = timedelta(minutes=5)
    """In a bucket, the time after which a save that does not get through ends the run."""
    grace_period: PositiveDuration = timedelta(seconds=30)
    """In a bucket, the time that the last save has after a stop signal: that after which the machine is taken away."""

    absent: ClassVar[Mapping[str, str]] = {
        "create": "use CheckpointStore(Path(config.expanded_path(run_id)), config) of lm_trainer.checkpoint.store",
    }

    def expanded_path(self, run_id: str) -> str:
        """The directory of the checkpoints of a run."""
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
    """Returns True if the step policy keeps the checkpoint of `step` for ever."""
    # The first range that reaches to the step decides alone, even where a later one would keep it too.
    for entry in keep:
        if entry.until is None or step <= entry.until:
            return step > 0 and step % entry.every == 0
    return False
