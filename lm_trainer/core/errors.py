"""Errors that are addressed to the person at the terminal, and the exit codes that they stand for."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from lm_trainer.core.credentials import without_credentials

# Full, over quota, too large, read-only, broken, or a mount that went away.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})

EXIT_CRASH = 1
EXIT_CONFIG = 2
EXIT_NON_FINITE = 3
EXIT_PREEMPTED = 75
"""`EX_TEMPFAIL` of sysexits.h: everything is saved, start me again."""


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


class Preempted(UserError):
    """The run was asked to stop and has saved everything."""

    exit_code = EXIT_PREEMPTED


def disk_error(error: OSError) -> MachineError | None:
    """Translates an error of a full, broken or read-only disk for the user, wherever it was met; None for others."""
    if error.errno not in _DISK_ERRORS:
        return None
    return MachineError(
        f"{error.filename or 'a file'}: {error.strerror}; make room or mend the disk, then start the same command again"
    )
