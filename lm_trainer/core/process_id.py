"""A process by the name that its locks give it, and whether it is known to have ended."""

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
    """A process of any machine."""

    host: str
    pid: int
    boot: str = ""
    """Number of the start of the machine that it belongs to; empty where that is not known."""

    @classmethod
    def of_this_process(cls) -> ProcessId:
        """Returns the name of the process that calls this."""
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), os.getpid(), boot.read_text().strip() if boot.exists() else "")

    @classmethod
    def parsed(cls, record: Mapping[str, Any]) -> ProcessId | None:
        """Returns the process whose fields are in a record, or None where it names none."""
        host, pid, boot = record.get("host"), record.get("pid"), record.get("boot", "")
        if not isinstance(host, str) or not isinstance(pid, int) or not isinstance(boot, str):
            return None
        return cls(host, pid, boot)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def has_ended(self) -> bool:
        """Returns True if no such process is left on this machine; False too where it is one of another machine.

        A process that was started later may have its number: then it counts as running.
        """
        here = ProcessId.of_this_process()
        if self.host != here.host or self.boot not in ("", here.boot):
            return False
        return not _is_running(self.pid)


def _is_running(pid: int) -> bool:
    if pid <= 0:  # names a group of processes
        return False
    try:
        # Signal 0 is not sent; it only checks whether the process exists.
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has so large a number
        return False
    except OSError:  # it exists, and belongs to another user
        return True
    # A process that has ended and was not waited for still has its number.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
