"""The end of a terminal, as when a connection by ssh breaks: SIGHUP, and output that nobody can read any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns those of the signals to which this process is to react: `nohup` starts a program that ignores SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in signals if not (ignored and number == signal.SIGHUP)]


def leave_terminal() -> None:
    """Sends to nowhere what this process still prints to the terminal, where writing would be an error from now on."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)
