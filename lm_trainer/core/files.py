"""Files that are complete or, after a crash, as they were before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lm_trainer.core.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of a file by a rename, so that a crash leaves the old content or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # A file system may carry out the rename before the data: after a power cut the file would be empty.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # An error of `write` does not know of which file.
        error.filename = str(path)
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def make_writable(directory: Path, setting: str) -> None:
    """Creates a directory and finds at once whether files can be written there.

    Args:
        directory: the directory, whose parents may be missing too.
        setting: the name of the setting by which the user can choose another place.

    Raises:
        UserError: when it cannot be created or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # By trying: permissions tell nothing of quotas, read-only mounts or network file systems.
        probe = directory / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); choose another place with {setting}"
        ) from error
