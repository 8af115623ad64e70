"""Removal of what a start leaves that failed before its first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Self

from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.files.bucket_mirror import COPY

_MADE_AT_THE_START = {"config.yaml", "run.json", ".lock", "tokenizer", "hf", "tensorboard", "metrics.jsonl", COPY}
"""Names that an attempt makes before its first step; with any other, a directory stays."""


class RemoveFailedStart:
    """Removes the directories of a run that came into being with an attempt which then failed before its first step.

    A context manager around those of the attempt. Directories that were there before stay, and so does anything that
    holds a step, a file of somebody else's, or a message.

    Args:
        directories: those on this machine, of the run and of its checkpoints.
    """

    def __init__(self, *directories: Path):
        self._directories = directories

    def __enter__(self) -> Self:
        made = [each for path in self._directories for each in (path, *path.parents) if not each.exists()]
        # Deepest first, each once.
        self._made = sorted(dict.fromkeys(made), key=lambda path: -len(path.parts))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not is_lead() or not all(path in self._made for path in self._directories):
            return
        if all(_only_began(path) for path in self._directories):
            for path in self._directories:
                shutil.rmtree(path, ignore_errors=True)
            for parent in self._made:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()


def _only_began(directory: Path) -> bool:
    if not directory.is_dir():
        return True
    metrics = directory / "metrics.jsonl"
    begun = metrics.is_file() and metrics.stat().st_size > 0
    return not begun and {path.name for path in directory.iterdir()} <= _MADE_AT_THE_START
