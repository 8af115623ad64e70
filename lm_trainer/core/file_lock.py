"""Locks local files and directories. A lock is released when its process ends for any reason."""

from __future__ import annotations

import errno
import fcntl
import time
from pathlib import Path

_RETRY_AFTER_SECONDS = 0.05
"""Time in seconds between two attempts to take a lock."""

# Uses flock, because the system releases it even if the process is killed. A lock based on the existence of a file
# would remain.


def try_lock(handle: int) -> bool:
    """Takes the lock of an open file or directory. The lock is held until the file is closed.

    Args:
        handle: the file descriptor.

    Returns:
        False if another process holds the lock.

    Raises:
        OSError: if the file system has no locks.
    """
    if not _try_flock(handle):
        # A process that calls `is_locked` holds the lock for a moment.
        time.sleep(_RETRY_AFTER_SECONDS)
        return _try_flock(handle)
    return True


def _try_flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def is_locked(file: Path) -> bool:
    """Returns True if a process holds the lock of a file, and False if none does or the file cannot be read."""
    try:
        with file.open() as opened:
            # A shared lock, so that two concurrent calls do not see each other's lock.
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
