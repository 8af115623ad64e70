"""Handlers of signals: they stop the training loop between two steps, have it save, or end other long work."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import numpy as np

from lm_trainer.core.errors import Preempted, Stopped
from lm_trainer.core.hangup import heeded, leave_terminal
from lm_trainer.parallel.processes import gather, is_lead

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _end_at_once(number: int) -> None:
    # Without cleanup: whoever asks twice does not want to wait for a save that may hang.
    os._exit(128 + number)


class _SecondSignal:
    """Thread that ends the process at the second of the given signals, even while the main thread runs no Python.

    Python calls handlers in the main thread, between two instructions: two signals that come while it is inside a
    computation of JAX are one call. The interpreter writes every signal to a file descriptor as it comes.
    """

    def __init__(self, signals: list[signal.Signals]):
        self._signals = set(signals)
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)  # a handler must not wait
        self._thread = threading.Thread(target=self._count, name="second-signal", daemon=True)
        self._before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        self._written.close()
        self._thread.join()
        self._read.close()

    def _count(self) -> None:
        count = 0
        while number := self._read.recv(1):
            count += number[0] in self._signals
            if count == 2:
                _end_at_once(number[0])


# A forked process would write its signals to the parent's thread: Ctrl-C, which all processes get, would count twice.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class _Handlers:
    """Handlers of SIGTERM, SIGINT and SIGHUP while active; the second signal ends the process with 128 + its number.

    SIGHUP, which comes when the terminal is closed, stays ignored in a process that `nohup` has started.

    Attributes:
        requested: the name of the first signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[int, Any] = {}
        self._second: _SecondSignal | None = None

    def __enter__(self) -> Self:
        signals = heeded(_SIGNALS)
        self._second = _SecondSignal(signals)
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._second:
            self._second.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            leave_terminal()
        if self.requested:
            _end_at_once(number)
        self.requested = signal.Signals(number).name
        self._on_first()

    def _on_first(self) -> None:
        """Reacts to the first signal, which is recorded already."""
        raise NotImplementedError


class StopRequest(_Handlers):
    """Request to stop after the present step, for a loop that polls `requested`; a context manager.

    Before `arm` is called there is nothing to save, and the first signal ends the run by raising `Preempted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._armed = False

    def arm(self) -> None:
        """Declares that from now on there is state that is worth saving."""
        self._armed = True

    def _on_first(self) -> None:
        if not self._armed:
            raise preempted(self.requested, 0)
        _tell(f"\n{self.requested}: stopping after this step; once more stops at once\n")


SAVE_NOW, STOP_AFTER_SAVE = "save-now", "stop-after-save"
"""Files in the run directory by which a user asks for a checkpoint, and for an end after one."""

_LOOK_SECONDS = 1.0
"""Time between two looks for these files, which may be on a network file system."""


class Asked(NamedTuple):
    """The requests that all processes of a run have agreed on after a step."""

    stop: bool
    save: bool
    stop_after_save: bool


class SaveRequests:
    """Requests for a permanent checkpoint, by SIGUSR1 or by files in the run directory; a context manager.

    Args:
        directory: the run directory.
        clock: seconds that only grow.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic):
        self._files = {name: directory / name for name in (SAVE_NOW, STOP_AFTER_SAVE)}
        self._signalled, self._clock, self._next_look = False, clock, 0.0
        self._seen = dict.fromkeys(self._files, False)
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def agree(self, stop: bool) -> Asked:
        """Exchanges the requests of all processes; every process must call it after the same step.

        Args:
            stop: True if this process has been asked to stop.
        """
        if is_lead() and self._clock() >= self._next_look:
            self._next_look = self._clock() + _LOOK_SECONDS
            self._seen = {name: file.exists() for name, file in self._files.items()}
        flags = [stop, self._signalled or self._seen[SAVE_NOW], self._seen[STOP_AFTER_SAVE]]
        return Asked(*(bool(any(column)) for column in gather(np.asarray(flags)).T))

    def saved(self) -> None:
        """Marks the request for a checkpoint as heeded."""
        self._signalled = False
        self._remove(SAVE_NOW)

    def stopping(self) -> None:
        """Marks the request to stop after a checkpoint as heeded."""
        self._remove(STOP_AFTER_SAVE)

    def _remove(self, name: str) -> None:
        self._seen[name] = False
        if is_lead():
            # One that cannot be removed is heeded again: that is seen, and does no harm.
            with contextlib.suppress(OSError):
                self._files[name].unlink(missing_ok=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True
        _tell("\nSIGUSR1: saving after this step\n")


class Interruption(_Handlers):
    """End, by an exception, of work that is no training; a context manager.

    Python loses an exception that is raised while it collects garbage, so long work should also poll `came`.

    Args:
        kept: tells the user what remains of the work that was done.
    """

    def __init__(self, kept: str):
        super().__init__()
        self._kept = kept
        self._raised: BaseException | None = None
        self._report_unraisable = sys.unraisablehook

    def __enter__(self) -> Self:
        self._report_unraisable, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        sys.unraisablehook = self._report_unraisable

    def came(self) -> bool:
        """Returns True once a signal has come."""
        return self.requested is not None

    def error(self) -> BaseException:
        """The exception that ends the work."""
        if self.requested == "SIGINT":
            return KeyboardInterrupt()
        return Preempted(f"stopped by {self.requested}; {self._kept}")

    def _on_first(self) -> None:
        self._raised = self.error()
        raise self._raised

    def _unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Reports an exception that Python has lost, unless `came` tells of it."""
        if lost.exc_value is not self._raised:
            self._report_unraisable(lost)


def _tell(text: str) -> None:
    """Writes to stderr from the handler of a signal, which an output that is gone must not disturb."""
    with contextlib.suppress(OSError):
        # Not `print`: the signal may have come in the middle of one, whose lock this thread holds.
        os.write(2, text.encode())


def preempted(signal: str | None, step: int) -> Preempted:
    """The exception that ends a run after `step` steps, because of a signal to this process or another."""
    by = signal or "another process"
    if not step:
        return Preempted(f"stopped by {by} before the first step; there was nothing to save")
    return Preempted(_saved(by, step))


def stopped_after_save(step: int) -> Stopped:
    """The exception that ends a run after the checkpoint of `step`, because of the file `stop-after-save`."""
    return Stopped(_saved(STOP_AFTER_SAVE, step))


def _saved(by: str, step: int) -> str:
    return f"stopped by {by} after step {step}; everything is saved, and the same command goes on from here"
