"""The end of a terminal, as when a connection by ssh breaks: SIGHUP, and output that nobody can read any more."""

from __future__ import annotations

import os
import signal


def heeds_hangups() -> bool:
    """Tells whether this process is to end with its terminal: `nohup` starts a program that is not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def leave_terminal() -> None:
    """Sends to nowhere what this process still prints to the terminal, where writing would be an error from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)
