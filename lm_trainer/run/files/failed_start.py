"""Cleans up after an attempt that failed before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.files.records import COPY_DIRECTORY

_CREATED_AT_START = {
    "config.yaml",
    "run.json",
    ".lock",
    "tokenizer",
    "hf",
    "tensorboard",
    "metrics.jsonl",
    COPY_DIRECTORY,
}
"""Names of the files and directories that an attempt creates before its first step. A directory with any other entry is
kept."""


class RemoveFailedStart:
    """Context manager that removes the directories created by an attempt if it fails before its first step.

    It encloses the other context managers of the attempt. Directories that existed before are kept, and so are
    directories that contain a checkpoint, metrics or other files.

    Args:
        directories: local directories of the run and of its checkpoints.
    """

    def __init__(self, *directories: Path):
        self._directories = directories

    def __enter__(self) -> Self:
        missing = [parent for path in self._directories for parent in (path, *path.parents) if not parent.exists()]
        # Removes duplicates, and sorts the deepest directories first.
        self._created = sorted(dict.fromkeys(missing), key=lambda path: -len(path.parts))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_lead() or not all(path in self._created for path in self._directories):
            return
        if all(_has_no_steps(path) for path in self._directories):
            for path in self._directories:
                shutil.rmtree(path, ignore_errors=True)
            for parent in self._created:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()


def _has_no_steps(directory: Path) -> bool:
    if not directory.is_dir():
        return True
    metrics = directory / "metrics.jsonl"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return not has_metrics and {path.name for path in directory.iterdir()} <= _CREATED_AT_START
