"""Artifacts in a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.trackers.base import Composite


class Artifacts:
    """Writes files to `RUN_DIR/artifacts` and passes them to the trackers."""

    def __init__(self, directory: RunDirectory, tracker: Composite):
        self._directory, self._tracker = directory, tracker

    def write(self, name: str, artifact: Any, *, type: str) -> Path:
        """Saves an artifact and returns its path; see `Trainer.write_artifact`."""
        file = self._directory.write_artifact(name, artifact)
        if is_lead():
            self._tracker.log_artifact(name, file, type=type)
        return file

    def log(self, name: str, file: Path, *, type: str) -> None:
        """Passes an existing file to the trackers, without copying it to the run directory."""
        self._tracker.log_artifact(name, file, type=type)
