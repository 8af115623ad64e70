"""Injects faults of the file system and the clock into a process with a preloaded library.

library = build(directory)
Fault("fail", call="rename", path="cache/*", index=3, error="ENOSPC").environment(below, log)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("soak_shim.c")
WRITES = ("create", "write", "sync", "truncate", "rename", "link", "unlink", "mkdir")
READS = ("open", "read")
ERRORS = {
    "open": ("EIO", "ESTALE", "EACCES", "EMFILE"),
    "read": ("EIO", "ESTALE"),
    "create": ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EROFS", "EACCES", "EMFILE"),
    "write": ("ENOSPC", "EIO", "EDQUOT", "ESTALE"),
    "sync": ("ENOSPC", "EIO", "EDQUOT", "ESTALE"),
    "truncate": ("EIO", "ESTALE"),
    "rename": ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EROFS", "EACCES"),
    "link": ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EROFS", "EACCES"),
    "unlink": ("EIO", "ESTALE", "EROFS", "EACCES"),
    "mkdir": ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EROFS", "EACCES"),
}
"""Errors that a file system may return, by call. `create` opens for writing, and `open` opens for reading."""
LASTING = ("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE")
"""Errors that can persist after they first occur."""


class NoCompiler(Exception):
    """The machine has no C compiler."""


def build_library(directory: Path) -> Path:
    """Compiles the library.

    Raises:
        NoCompiler: if the machine has no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("the soak needs a C compiler (cc) for the library that injects faults")
    library = directory / "soak_shim.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return library


@dataclass(frozen=True)
class Fault:
    """A fault that is injected at one call of a process.

    Attributes:
        action: `kill`, `tear` (write half, then kill), `shorten` (write half), `fail`, `fail-on` (fail this call and
            all later writes or reads, depending on the call), `stop` (SIGSTOP), `vanish` (rename `victim` to `to`),
            `clock` (jump by `seconds`).
        call: kind of call, a key of `ERRORS`.
        path: pattern of paths, relative to the watched directory.
        index: index of the call among all matching calls, from 1.
        error: name of the error for `fail` and `fail-on`.
    """

    action: str
    call: str = ""
    path: str = ""
    index: int = 1
    error: str = "EIO"
    victim: str = ""
    to: str = ""
    seconds: int = 0

    def environment(self, below: Path, log: Path) -> dict[str, str]:
        """Returns variables for a process with the preloaded library, which logs calls with faults to `log`."""
        return {
            **logging_environment(below, log),
            "WORLD_ACTION": self.action,
            "WORLD_CALL": self.call,
            "WORLD_PATH": self.path,
            "WORLD_AT": str(self.index),
            "WORLD_ERRNO": str(getattr(errno, self.error)),
            "WORLD_VICTIM": self.victim,
            "WORLD_TO": self.to,
            "WORLD_SECONDS": str(self.seconds),
        }

    def __str__(self) -> str:
        error = f" with {self.error}" if self.action.startswith("fail") else ""
        target = f" at call {self.index} of {self.call or 'any'} on {self.path or 'any path'}"
        detail = f": {self.victim}" if self.victim else f" by {self.seconds // 86400} days" if self.seconds else ""
        return f"{self.action}{error}{target}{detail}"

    @property
    def reason(self) -> str:
        """Message of the system for the error."""
        return os.strerror(getattr(errno, self.error))


def logging_environment(below: Path, log: Path) -> dict[str, str]:
    """Returns variables for a process without faults that logs every call to `log`."""
    return {"WORLD_BELOW": str(below), "WORLD_LOG": str(log)}


def count_calls(log: Path) -> dict[tuple[str, str], int]:
    """Counts the calls in a log by kind of call and kind of file: {(call, pattern of paths): count}."""
    counts: dict[tuple[str, str], int] = {}
    for line in log.read_text().splitlines():
        call, _, path = line.partition("\t")
        key = call, path_pattern(path)
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items()))


def path_pattern(path: str) -> str:
    """Returns a pattern that matches a path and all paths that differ only in numbers and random names."""
    path = re.sub(r"(?<=/d/)[0-9a-f]{8,}(\.__lock)?", "*", path)
    path = re.sub(r"[0-9a-f]{16,}|\d+", "*", path)
    return re.sub(r"\*[*]+", "*", path).replace("[", "?").replace("]", "?")
