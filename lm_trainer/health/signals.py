"""Signal handlers: stop the training loop after a step, request a checkpoint, or end other long-running work."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lm_trainer.core.errors import Preempted, Stopped
from lm_trainer.core.terminal_loss import redirect_terminal_to_devnull, signals_to_handle
from lm_trainer.parallel.flags import FlagExchange
from lm_trainer.parallel.processes import is_lead

if TYPE_CHECKING:
    import numpy as np

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_REQUEST_SECONDS = {signal.SIGTERM: 1.0, signal.SIGHUP: 1.0, signal.SIGINT: 0.1}
"""A signal that comes so soon after the first one is the same request. A person repeats Ctrl-C (SIGINT) faster.

`timeout` sends a signal to its child and to the group of its child. systemd and SLURM send it to a launcher and to the
processes that it forwards the signal to.
"""


class _Repeats:
    """Tells requests to stop at once from repeated deliveries of the first request."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_second_request(self, number: int) -> bool:
        """Records a signal. Returns True if it asks to stop at once."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first >= _SAME_REQUEST_SECONDS[signal.Signals(number)]


def _exit_immediately(number: int) -> None:
    # Skips all cleanup, because after a second signal the process must not wait for a save that may hang.
    os._exit(128 + number)


class _SecondSignalWatcher:
    """Thread that ends the process when a second signal arrives, even while the main thread executes no Python code.

    Python calls handlers in the main thread between bytecode instructions, so two signals during a JAX computation
    cause only one call. This thread reads a file descriptor to which the interpreter writes every signal immediately.
    """

    def __init__(self, signals: list[signal.Signals]):
        self._signals = set(signals)
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)  # a handler must not wait
        self._thread = threading.Thread(target=self._count_signals, name="second-signal", daemon=True)
        self._previous = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous)
        self._written.close()
        self._thread.join()
        self._read.close()

    def _count_signals(self) -> None:
        repeats = _Repeats()
        while number := self._read.recv(1):
            if number[0] in self._signals and repeats.is_second_request(number[0]):
                _exit_immediately(number[0])


# A forked process would also send its signals to the thread of its parent. Ctrl-C reaches both processes, so it would
# count twice.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class _Handlers:
    """Context manager that handles SIGTERM, SIGINT and SIGHUP.

    The second signal ends the process with exit code 128 + its number, unless it only repeats the first one (see
    `_SAME_REQUEST_SECONDS`).

    In a process started by `nohup`, SIGHUP (sent when the terminal closes) remains ignored.

    Attributes:
        requested: name of the first signal received; None if there was none.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._repeats = _Repeats()
        self._previous: dict[int, Any] = {}
        self._second: _SecondSignalWatcher | None = None

    def __enter__(self) -> Self:
        signals = signals_to_handle(_SIGNALS)
        self._second = _SecondSignalWatcher(signals)
        for number in signals:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._second:
            self._second.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            redirect_terminal_to_devnull()
        if self._repeats.is_second_request(number):
            _exit_immediately(number)
        if self.requested:
            return
        self.requested = signal.Signals(number).name
        self._on_first()

    def _on_first(self) -> None:
        """Reacts to the first signal, after it was recorded."""
        raise NotImplementedError


class StopRequest(_Handlers):
    """Context manager that turns a termination signal into a request to stop after the current step.

    The training loop polls `requested`. Before `arm` is called there is no state to save, so the first signal ends the
    run by raising `Preempted`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._armed = False

    def arm(self) -> None:
        """Declares that from now on there is training state to save."""
        self._armed = True

    def _on_first(self) -> None:
        if not self._armed:
            raise preempted_error(self.requested, 0)
        _write_stderr(f"\n{self.requested}: stopping after this step; once more stops at once\n")


SAVE_NOW, STOP_AFTER_SAVE = "save-now", "stop-after-save"
"""Names of the files in the run directory that request a checkpoint, and a stop after a checkpoint."""

_CHECK_SECONDS = 1.0
"""Number of seconds between checks for these files, which may be on a network file system."""


class Requests(NamedTuple):
    """Requests that all processes of a run agreed on after a step."""

    stop: bool
    save: bool
    """Save a permanent checkpoint."""
    stop_after_save: bool
    overdue: bool
    """A temporary checkpoint is due."""


class SaveRequests:
    """Context manager that receives requests for a permanent checkpoint, by SIGUSR1 or by files in the run directory.

    Args:
        directory: the run directory.
        clock: monotonic clock in seconds.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic):
        self._files = {name: directory / name for name in (SAVE_NOW, STOP_AFTER_SAVE)}
        self._signalled, self._clock, self._next_check = False, clock, 0.0
        self._seen = dict.fromkeys(self._files, False)
        self._exchange = FlagExchange()
        # True if checkpoints were saved since the last exchange. They may have fulfilled requests that are still being
        # exchanged.
        self._has_saved = self._has_saved_permanently = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._previous)

    @property
    def seconds(self) -> np.ndarray | None:
        """Times that all processes have sent with the requests of the step before; see `FlagExchange`."""
        return self._exchange.seconds

    def agree_on_requests(self, stop: bool, *, overdue: bool = False, seconds: Sequence[float] = ()) -> Requests:
        """Exchanges the requests of all processes. Every process must call this method after the same step.

        With several processes, a request takes effect one step later, so that no process has to wait for its devices.

        Args:
            stop: True if this process received a request to stop.
            overdue: True if a temporary checkpoint is due according to the clock of this process.
            seconds: times of this process to send to the others.
        """
        if is_lead() and self._clock() >= self._next_check:
            self._next_check = self._clock() + _CHECK_SECONDS
            self._seen = {name: file.exists() for name, file in self._files.items()}
        requests = Requests(stop, self._signalled or self._seen[SAVE_NOW], self._seen[STOP_AFTER_SAVE], overdue)
        agreed = Requests(**self._exchange.exchange(requests._asdict(), seconds))
        if self._exchange.is_late:
            save = agreed.save and not self._has_saved_permanently
            agreed = agreed._replace(save=save, overdue=agreed.overdue and not self._has_saved)
        self._has_saved = self._has_saved_permanently = False
        return agreed

    def mark_saved(self, *, permanently: bool) -> None:
        """Marks the requests as done that a checkpoint of the last step fulfils.

        Args:
            permanently: True if the checkpoint is permanent.
        """
        self._has_saved = True
        if permanently:
            self._has_saved_permanently, self._signalled = True, False
            self._remove_file(SAVE_NOW)

    def mark_stopping(self) -> None:
        """Marks the request to stop after a checkpoint as done."""
        self._remove_file(STOP_AFTER_SAVE)

    def _remove_file(self, name: str) -> None:
        self._seen[name] = False
        if is_lead():
            # If the file cannot be removed, the request is repeated, which users will notice but does no harm.
            with contextlib.suppress(OSError):
                self._files[name].unlink(missing_ok=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True
        _write_stderr("\nSIGUSR1: saving after this step\n")


class InterruptHandler(_Handlers):
    """Context manager that raises an exception at the first signal, to interrupt work other than training.

    Python drops an exception raised during garbage collection, so long work should also poll `is_interrupted`.

    Args:
        results_note: text for the user that says which results are kept.
    """

    def __init__(self, results_note: str):
        super().__init__()
        self._results_note = results_note
        self._raised: BaseException | None = None
        self._report_unraisable = sys.unraisablehook

    def __enter__(self) -> Self:
        self._report_unraisable, sys.unraisablehook = sys.unraisablehook, self._handle_unraisable
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        sys.unraisablehook = self._report_unraisable

    def is_interrupted(self) -> bool:
        """Returns True if a signal was received."""
        return self.requested is not None

    def to_exception(self) -> BaseException:
        """Returns the exception that ends the work."""
        if self.requested == "SIGINT":
            return KeyboardInterrupt()
        return Preempted(f"stopped by {self.requested}; {self._results_note}")

    def _on_first(self) -> None:
        self._raised = self.to_exception()
        raise self._raised

    def _handle_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        """Reports an exception dropped by Python, except the one raised here, which `is_interrupted` makes known."""
        if dropped.exc_value is not self._raised:
            self._report_unraisable(dropped)


def _write_stderr(text: str) -> None:
    """Writes to stderr from a signal handler. Ignores errors, for example if stderr is closed."""
    with contextlib.suppress(OSError):
        # `print` could fail: the signal may have interrupted a call of it in this thread, which still holds the lock of
        # the stream.
        os.write(2, text.encode())


def preempted_error(signal: str | None, step: int) -> Preempted:
    """Returns the exception that ends a run after `step` steps because this or another process received a signal."""
    cause = signal or "another process"
    if not step:
        return Preempted(f"stopped by {cause} before the first step; there was nothing to save")
    return Preempted(_describe_saved_stop(cause, step))


def stopped_after_save_error(step: int) -> Stopped:
    """Returns the exception that ends a run after the checkpoint of `step` because of the file `stop-after-save`."""
    return Stopped(_describe_saved_stop(STOP_AFTER_SAVE, step))


def _describe_saved_stop(cause: str, step: int) -> str:
    return f"stopped by {cause} after step {step}; everything is saved, and the same command goes on from here"
