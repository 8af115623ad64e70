"""Supervises the processes of a run: forwards their output, and stops all of them if one fails."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self

from lm_trainer.core.errors import EXIT_PREEMPTED, EXIT_STOPPED
from lm_trainer.core.terminal_loss import redirect_terminal_to_devnull, signals_to_handle

GRACE_PERIOD = 15.0
"""Number of seconds that the other processes have to end by themselves after a failure, and also to end after SIGTERM.

It is longer than the time `FailureDetector` needs to end them with its own error message.
"""

_TICK_SECONDS = 0.05
# Maximum time to read the last output lines of a process after it has ended. Its child processes may keep the pipe open
# longer.
_DRAIN_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
# PR_SET_PDEATHSIG makes the kernel signal the child when its parent dies, even from SIGKILL. A small wrapper program
# sets it, because running a function between fork and exec (`preexec_fn`) may deadlock in a process with threads.
_END_WITH_PARENT = (
    sys.executable,
    "-Sc",
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)
_CONSEQUENCES = (signal.SIGABRT, signal.SIGTERM)
"""Signals that may kill a process because another one is missing: JAX aborts without the process that coordinates."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Status(NamedTuple):
    """Result of polling a process: its output since the last poll, and its exit code."""

    lines: list[str]
    """Output lines, without line ends."""
    code: int | None
    """None while the process runs; then its exit code, or the negative signal number if a signal killed it."""


class End(NamedTuple):
    """End of all processes of a run."""

    code: int
    """The exit code of the first failed process, or 128 + the signal number if a process was killed by a signal that
    the supervisor did not send. The signal has priority: other processes may fail because the killed one is missing,
    and their failures may be seen first. If no process failed, 75 or 76 if any was stopped after saving, otherwise
    0."""
    lost: frozenset[int] = frozenset()
    """Positions of the processes that were killed, and not because another one is missing."""
    interrupted: bool = False
    """True if the supervisor received a signal for the processes."""


class SupervisedProcess(Protocol):
    """One process of a run, local or remote."""

    @property
    def location(self) -> str:
        """Host and process ID for messages, such as `pid 17` or `host a, pid 17`."""
        ...

    def poll(self) -> Status:
        """Returns the output since the last call and the exit code, without waiting."""
        ...

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process. Does nothing if the process has ended."""
        ...


class LocalProcess:
    """`SupervisedProcess` on this machine. On Linux it receives SIGTERM when its parent dies."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], directory: str):
        self._process = subprocess.Popen(
            [*_END_WITH_PARENT, *command] if sys.platform == "linux" else command,
            env=dict(environ),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # With a new session, Ctrl-C reaches the process only once, through `send_signal`, and not also from the
            # terminal.
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A thread reads the pipe, because a full pipe would block the process, and reading in `poll` would block the
        # supervisor.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def location(self) -> str:
        return f"pid {self._process.pid}"

    def poll(self) -> Status:
        code = self._process.poll()
        if code is not None:
            # The output is complete when the pipe is closed, but a child of the process may keep it open.
            self._reader.join(_DRAIN_SECONDS)
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return Status(lines, code)

    def send_signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.decode(errors="replace").rstrip("\r\n"))


def find_free_address(host: str = "127.0.0.1") -> str:
    """Finds a port on `host` that is currently free, and returns the address as `host:port`."""
    with socket.socket() as server:
        server.bind((host, 0))
        return f"{host}:{server.getsockname()[1]}"


def supervise(
    processes: Sequence[SupervisedProcess],
    write: Callable[[str], object],
    *,
    first_index: int = 0,
    grace_period: float = GRACE_PERIOD,
    clock: Callable[[], float] = time.monotonic,
) -> End:
    """Waits until all processes have ended.

    Every signal that this process receives is forwarded once to each process. After the first failure of a process, the
    others get time to end by themselves, then SIGTERM, then SIGKILL.

    Args:
        processes: the processes, in order of their index in the run.
        first_index: index of the first of these processes in the run.
        write: receives each line of output, prefixed with the index of its process, and the messages of the supervisor.
        grace_period: see `GRACE_PERIOD`.
        clock: monotonic time in seconds.
    """
    running, last_index = dict(enumerate(processes, first_index)), first_index + len(processes)
    write = _GuardedOutput(write)
    takedown = _Takedown(grace_period, clock)
    first, stopped, lost = 0, 0, set[int]()
    with _ForwardedSignals(running) as signals:
        while running:
            for index, process in list(running.items()):
                lines, code = process.poll()
                for line in lines:
                    write(f"[{index}] {line}")
                if code is None:
                    continue
                del running[index]
                if code < 0 and -code not in _CONSEQUENCES and not takedown.sent:
                    lost.add(index - first_index)
                if code in (EXIT_PREEMPTED, EXIT_STOPPED):
                    stopped = code
                elif code and (not first or (code < 0 < first and not takedown.sent)):
                    # A killed process has priority over a failed one, which may have failed only because the other was
                    # killed.
                    first = code
                    write(f"process {index} of {last_index} ({process.location}) {describe_exit(code)}")
                    takedown.begin()
            if running and (number := takedown.take_due_signal()):
                write(f"sending {number.name} to process {', '.join(map(str, running))}")
                for process in running.values():
                    process.send_signal(number)
            time.sleep(_TICK_SECONDS)
    code = 128 - first if first < 0 else first or stopped
    return End(code, frozenset(lost), signals.received)


def describe_exit(code: int) -> str:
    """Describes how a process ended, as a verb phrase."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _GuardedOutput:
    """Output that is dropped after a write error, such as a closed terminal, so that supervision continues."""

    def __init__(self, write: Callable[[str], object]):
        self._write, self._open = write, True

    def __call__(self, line: str) -> None:
        try:
            if self._open:
                self._write(line)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._open = False


class _Takedown:
    """Schedule of the signals that are sent to the remaining processes after a failure."""

    def __init__(self, grace_period: float, clock: Callable[[], float]):
        self._grace_period, self._clock = grace_period, clock
        self._plan: list[tuple[float, signal.Signals]] = []
        self.sent = False

    def begin(self) -> None:
        if self._plan:
            return
        soon = self._clock() + self._grace_period
        self._plan = [(soon, signal.SIGTERM), (soon + self._grace_period, signal.SIGKILL)]

    def take_due_signal(self) -> signal.Signals | None:
        if not self._plan or self._clock() < self._plan[0][0]:
            return None
        self.sent = True
        return self._plan.pop(0)[1]


class _ForwardedSignals:
    """Context manager that installs handlers which forward signals to every running process."""

    def __init__(self, running: Mapping[int, SupervisedProcess]):
        self._running = running
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.received = False

    def __enter__(self) -> Self:
        for number in signals_to_handle(_SIGNALS):
            self._previous_handlers[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = True
        if number == signal.SIGHUP:
            redirect_terminal_to_devnull()
        # Iterates over a copy, because the handler may interrupt the loop that removes ended processes.
        for process in list(self._running.values()):
            process.send_signal(number)
