"""Locks of files and directories of this machine, which end with their process, however it ends."""

from __future__ import annotations

import errno
import fcntl
import time
from pathlib import Path

_MOMENT = 0.05
"""Seconds."""

# flock, since the system releases it even when the process is killed; the mere existence of a file would outlive it.


def try_lock(handle: int) -> bool:
    """Takes the lock of an open file or directory, until it is closed.

    Args:
        handle: its descriptor.

    Returns:
        False when another process holds it.

    Raises:
        OSError: where the file system has no locks.
    """
    if not _take(handle):
        # A process that only asks (`is_locked`) has it for a moment.
        time.sleep(_MOMENT)
        return _take(handle)
    return True


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def is_locked(file: Path) -> bool:
    """Returns True if a process holds the lock of a file; False too where the file cannot be read."""
    try:
        with file.open() as opened:
            # Shared, so that two who ask do not see each other.
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
