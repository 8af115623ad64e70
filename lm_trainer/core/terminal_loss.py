"""Handles the loss of the terminal, for example when an ssh connection breaks: SIGHUP, and output with no reader."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def signals_to_handle(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns the signals that this process should handle. Leaves out SIGHUP if it is ignored, as under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal_ for signal_ in signals if not (ignored and signal_ == signal.SIGHUP)]


def redirect_terminal_to_devnull() -> None:
    """Redirects output to a lost terminal to /dev/null, because further writes would fail."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if os.isatty(stream):
            os.dup2(devnull, stream)
    os.close(devnull)
