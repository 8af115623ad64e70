"""Errors that are addressed to the person at the terminal, and the exit codes that they stand for."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from io import IOBase
from pathlib import Path

from lm_trainer.core.credentials import without_credentials

_DISK = "make room or mend the disk"
_LIMIT = "raise the limit of open files (ulimit -n)"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE), _DISK),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _LIMIT),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "mend the permissions"),
}
"""Error of the machine -> what to do."""

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED(?!.*out of memory)|(ran )?out[ _]of[ _]memory|CU\w+_STATUS_ALLOC_FAILED", re.IGNORECASE
)
# The small memories of a chip, which a kernel's tiles fill whatever the size of the run, and gRPC's messages.
_OTHER_RESOURCE = re.compile(
    r"memory space (?!hbm)\w+|space=[sv]mem|shared memory size|message larger than max", re.IGNORECASE
)

EXIT_CRASH = 1
EXIT_CONFIG = 2
EXIT_NON_FINITE = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_PREEMPTED = 75
"""`EX_TEMPFAIL` of sysexits.h: everything is saved, start me again."""
EXIT_STOPPED = 76
"""Everything is saved, and the run ends here because a person asked for it: do not start it again."""


class UserError(Exception):
    """A mistake or a state of the machine that the user can mend.

    The command line prints the message alone, without a traceback, and exits with `exit_code`.
    The message names the fault, its place and the remedy; credentials in its URLs are blanked.
    """

    exit_code: int = EXIT_CONFIG

    def __init__(self, message: str):
        super().__init__(without_credentials(message))


class ConfigError(UserError):
    """All faults of a configuration, found in one pass.

    `problems` holds one line each, sorted by position, already with `file:line:column` where there is one.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(without_credentials(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


class MachineError(UserError):
    """The configuration is right, but the machine cannot do it: a full disk, a dead mount, lost permissions."""

    exit_code = EXIT_CRASH


class NonFiniteError(UserError):
    """Training was stopped because the loss or the gradient was NaN or infinite."""

    exit_code = EXIT_NON_FINITE


class OutOfMemoryError(UserError):
    """The memory of a device, or of the host, is too small for what was to be computed."""

    exit_code = EXIT_OUT_OF_MEMORY


class Preempted(UserError):
    """The run was asked to stop and has saved everything."""

    exit_code = EXIT_PREEMPTED


class Stopped(Preempted):
    """A person asked the run to stop, so that no scheduler is to start it again."""

    exit_code = EXIT_STOPPED


def disk_error(error: OSError) -> MachineError | None:
    """Translates an error of a full, broken or read-only disk for the user, wherever it was met; None for others.

    So are errors of permissions and of too many open files.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    return MachineError(f"{_file_of(error)}: {error.strerror}; {remedy}, then start the same command again")


def _file_of(error: OSError) -> str:
    """The file of an error. One of reading or writing does not have it, and the functions that it came through do."""
    found, step = error.filename, error.__traceback__
    while error.filename is None and step is not None:
        named = filter(None, map(_name_of, step.tb_frame.f_locals.values()))
        found, step = next(named, found), step.tb_next
    return "a file" if found is None else str(found)


def _name_of(value: object) -> str | None:
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "name", None) if isinstance(value, IOBase) else None
    return name if isinstance(name, str) else None


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Translates an error of a device's or the host's memory, met at compilation or in a step; None for others."""
    if isinstance(error, OutOfMemoryError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"the memory of this machine is too small: {error or 'an allocation failed'}")
    said = str(error)
    # By its name: JAX is not imported for an error that something else has raised. Arrays that do not fit are a
    # ValueError of the same words.
    known = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or said.startswith("RESOURCE_EXHAUSTED: ")
    # Each backend says it in other words, and behind others: a step that failed fails what waits for it.
    if not known or (found := _OUT_OF_MEMORY.search(said)) is None:
        return None
    line = said[found.start() :].splitlines()[0]
    return None if _OTHER_RESOURCE.search(line) else OutOfMemoryError(f"the memory of a device is too small: {line}")
