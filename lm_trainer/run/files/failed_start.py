"""Cleanup after a start that failed before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.files.bucket_mirror import COPY_DIRECTORY

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
"""Names an attempt creates before its first step; a directory with other names is kept."""


class RemoveFailedStart:
    """Context manager removing directories created by an attempt that fails before its first step.

    It encloses the other context managers of the attempt. Existing directories are kept, and so are directories with a
    step, a foreign file, or metrics.

    Args:
        directories: local directories of the run and of its checkpoints.
    """

    def __init__(self, *directories: Path):
        self._directories = directories

    def __enter__(self) -> Self:
        missing = [parent for path in self._directories for parent in (path, *path.parents) if not parent.exists()]
        # Deepest first, without duplicates.
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
