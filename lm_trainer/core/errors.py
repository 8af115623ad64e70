"""Errors that are addressed to the user, and their exit codes."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from io import IOBase
from pathlib import Path

from lm_trainer.core.credentials import without_credentials

_FIX_DISK = "make room or mend the disk"
_RAISE_LIMIT = "raise the limit of open files (ulimit -n)"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE), _FIX_DISK),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _RAISE_LIMIT),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "mend the permissions"),
}
"""Maps an errno to the remedy."""

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED(?!.*out of memory)|(ran )?out[ _]of[ _]memory|CU\w+_STATUS_ALLOC_FAILED", re.IGNORECASE
)
# On-chip memories, which a kernel's tiles fill regardless of the size of the run, and gRPC's message limit.
_OTHER_RESOURCE = re.compile(
    r"memory space (?!hbm)\w+|space=[sv]mem|shared memory size|message larger than max", re.IGNORECASE
)

EXIT_CRASH = 1
EXIT_CONFIG = 2
EXIT_NON_FINITE = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_PREEMPTED = 75
"""`EX_TEMPFAIL` in sysexits.h: everything is saved, so restart the run."""
EXIT_STOPPED = 76
"""Everything is saved, and a person asked the run to end, so do not restart it."""
EXIT_HARDWARE = 77
"""Everything is saved, and a device computes wrong results, so do not restart on the same devices."""


class UserError(Exception):
    """A mistake, or a state of the machine, that the user can fix.

    The command line prints only the message, without a traceback, and exits with `exit_code`. The message names the
    fault, its location and the remedy. Credentials in its URLs are blanked.
    """

    exit_code: int = EXIT_CONFIG

    def __init__(self, message: str):
        super().__init__(without_credentials(message))


class ConfigError(UserError):
    """All faults of a configuration, which are found in one pass.

    `problems` holds one line per fault, sorted by position, with `file:line:column` if known.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(without_credentials(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


class MachineError(UserError):
    """The configuration is right, but the machine cannot run it: a full disk, a dead mount or lost permissions."""

    exit_code = EXIT_CRASH


class NonFiniteError(UserError):
    """Training was stopped because the loss or the gradient was NaN or infinite."""

    exit_code = EXIT_NON_FINITE


class HardwareError(UserError):
    """Devices computed different results for the same program and inputs."""

    exit_code = EXIT_HARDWARE


class OutOfMemoryError(UserError):
    """The memory of a device or of the host is too small for the computation."""

    exit_code = EXIT_OUT_OF_MEMORY


class Preempted(UserError):
    """The run was asked to stop and has saved everything."""

    exit_code = EXIT_PREEMPTED


class Stopped(Preempted):
    """A person asked the run to stop, so no scheduler should restart it."""

    exit_code = EXIT_STOPPED


def translate_disk_error(error: OSError) -> MachineError | None:
    """Translates a full, broken or read-only disk, missing permissions or too many open files into a user error.

    Returns None for any other error.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    return MachineError(f"{_find_error_file(error)}: {error.strerror}; {remedy}, then start the same command again")


def _find_error_file(error: OSError) -> str:
    """Returns the file of an error.

    Errors of read and write do not name it, but local variables in the traceback do.
    """
    filename, frame = error.filename, error.__traceback__
    while error.filename is None and frame is not None:
        named = filter(None, map(_open_file_name, frame.tb_frame.f_locals.values()))
        filename, frame = next(named, filename), frame.tb_next
    return "a file" if filename is None else str(filename)


def _open_file_name(value: object) -> str | None:
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "name", None) if isinstance(value, IOBase) else None
    return name if isinstance(name, str) else None


def translate_out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Translates an out-of-memory error of a device or the host, at compilation or in a step; None for other errors."""
    if isinstance(error, OutOfMemoryError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"the memory of this machine is too small: {error or 'an allocation failed'}")
    text = str(error)
    # Checked by class name, so that JAX is not imported for unrelated errors. Arrays too large for the device raise a
    # ValueError with the same words.
    from_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") or text.startswith("RESOURCE_EXHAUSTED: ")
    # Each backend words the error differently, and may put it after other text, as a failed step fails its dependents.
    if not from_jax or (match := _OUT_OF_MEMORY.search(text)) is None:
        return None
    line = text[match.start() :].splitlines()[0]
    return None if _OTHER_RESOURCE.search(line) else OutOfMemoryError(f"the memory of a device is too small: {line}")
