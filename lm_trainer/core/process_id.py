"""The identity of a process, as recorded in locks, and the check whether the process has ended."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessId:
    """A process on any machine."""

    host: str
    pid: int
    boot: str = ""
    """Boot ID of the machine; empty if unknown."""

    @classmethod
    def of_this_process(cls) -> ProcessId:
        """Returns the identity of the calling process."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), os.getpid(), boot.read_text().strip() if boot.exists() else "")

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ProcessId | None:
        """Returns the process that a record describes; None if fields are missing or malformed."""
        host, pid, boot = record.get("host"), record.get("pid"), record.get("boot", "")
        if not isinstance(host, str) or not isinstance(pid, int) or not isinstance(boot, str):
            return None
        return cls(host, pid, boot)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def has_ended(self) -> bool:
        """Returns True if the process ran on this machine and no longer exists, and False if it is on another machine.

        If a later process has the same PID, the process is considered running.
        """
        this_process = ProcessId.of_this_process()
        if self.host != this_process.host or self.boot not in ("", this_process.boot):
            return False
        return not _is_running(self.pid)


def _is_running(pid: int) -> bool:
    if pid <= 0:  # a process group
        return False
    try:
        # Signal 0 is not sent, but only checks that the process exists.
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # too large for a PID
        return False
    except OSError:  # the process exists and belongs to another user
        return True
    # A zombie (ended, but not yet waited for) still has its PID.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
