"""Checkpoints that branches need: a run keeps them, even if its policy would delete them.

Each branch has an empty file `branches/STEP-NAME` in the checkpoint directory. Removing the file releases the
checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

from lm_trainer.core.bucket import Bucket, StoragePath
from lm_trainer.core.errors import MachineError

PINS = "branches"
"""Directory of the files, relative to the checkpoint directory."""
_PIN = re.compile(r"(\d+)-.+")
_LIST_SECONDS = 20.0
"""Time that a bucket has to answer: the run waits, and deletes old checkpoints later if it does not."""


def pin_step(directory: StoragePath, step: int, branch: str) -> None:
    """Makes the run of a checkpoint directory keep a step for a branch.

    Raises:
        MachineError: if the directory cannot be written.
    """
    name = f"{step}-{branch}"
    if isinstance(directory, Bucket):
        directory.write(f"{PINS}/{name}", b"")
        return
    try:
        (directory / PINS).mkdir(exist_ok=True)
        (directory / PINS / name).touch()
    except OSError as error:
        raise MachineError(
            f"{directory / PINS / name}: cannot be written ({error.strerror or error}), so nothing would keep the "
            f"checkpoint of step {step} for the branch; mend the permissions"
        ) from error


def unpin_step(directory: StoragePath, step: int, branch: str) -> None:
    """Releases a step. Does nothing if the branch has not pinned it."""
    name = f"{step}-{branch}"
    if isinstance(directory, Bucket):
        directory.delete(f"{PINS}/{name}")
    else:
        (directory / PINS / name).unlink(missing_ok=True)


def pinned_steps(directory: StoragePath) -> set[int] | None:
    """Returns the steps that branches need; None if a bucket does not answer."""
    if isinstance(directory, Bucket):
        try:
            names = directory.list(PINS, seconds=_LIST_SECONDS)
        except MachineError:
            return None
    else:
        pins: Path = directory / PINS
        names = [path.name for path in pins.iterdir()] if pins.is_dir() else []
    return {int(match[1]) for name in names if (match := _PIN.fullmatch(name))}
