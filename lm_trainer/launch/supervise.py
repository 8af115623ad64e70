"""Supervisor of the processes of a run: forwards their output, and stops all when one of them fails."""

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
from lm_trainer.core.hangup import heeded, leave_terminal

GRACE_PERIOD = 15.0
"""Seconds that the others have to end by themselves after one has failed, and again to end when asked to.

More than `FailureDetector` needs to end them with an error of their own.
"""

_TICK_SECONDS = 0.05
# For the last lines of a process that has ended; a grandchild that keeps the pipe open must not hold us up for longer.
_DRAIN_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
# The kernel then signals the child when its parent dies, even of SIGKILL. A program of its own sets that, since a
# function between fork and exec (`preexec_fn`) may deadlock in a process with threads.
_END_WITH_PARENT = (
    sys.executable,
    "-Sc",
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Status(NamedTuple):
    """News of a process since the last poll."""

    lines: list[str]
    """Its output, without line ends."""
    code: int | None
    """None while it runs; its exit code; or, of one that a signal ended, the number of the signal, negative."""


class SupervisedProcess(Protocol):
    """One process of a run, wherever it is."""

    @property
    def place(self) -> str:
        """Host and process id, for people: `pid 17` or `host a, pid 17`."""
        ...

    def poll(self) -> Status:
        """Returns at once, with the news since the last call."""
        ...

    def send_signal(self, number: int) -> None:
        """Sends it a signal; does nothing if it has ended."""
        ...


class LocalProcess:
    """A `SupervisedProcess` on this machine, which is asked to stop when the process that started it dies."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], directory: str):
        self._process = subprocess.Popen(
            [*_END_WITH_PARENT, *command] if sys.platform == "linux" else command,
            env=dict(environ),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A session of its own: Ctrl-C reaches it once, through `send_signal`, and not from the terminal as well.
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A thread reads the pipe: a full one would block the process, and reading here would block the supervisor.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def place(self) -> str:
        return f"pid {self._process.pid}"

    def poll(self) -> Status:
        code = self._process.poll()
        if code is not None:
            # The output is complete when the pipe is closed, which a process that it started may keep open.
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


def free_address(host: str = "127.0.0.1") -> str:
    """Finds a `host:port` on which nothing listens at this moment."""
    with socket.socket() as server:
        server.bind((host, 0))
        return f"{host}:{server.getsockname()[1]}"


def supervise(
    processes: Sequence[SupervisedProcess],
    write: Callable[[str], object],
    *,
    grace_period: float = GRACE_PERIOD,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Waits until all processes have ended.

    Signals to this process are forwarded, each once to every process. The first process that fails takes the others
    down: they are given time to end by themselves, then asked to, then killed.

    Args:
        processes: by their number in the run.
        write: takes each line of output, with the number of its process in front, and messages of the supervisor.
        grace_period: see `GRACE_PERIOD`.
        clock: seconds that only grow.

    Returns:
        The exit code of the first that failed, or, of one that a signal ended before any was sent to it from here,
        128 + the number of the signal: another one may miss it, and fail for that reason, before its end is seen here.
        If none failed, 75 or 76 if any was stopped with everything saved, else 0.
    """
    running = dict(enumerate(processes))
    write = _Output(write)
    takedown = _Takedown(grace_period, clock)
    first, stopped = 0, 0
    with _ForwardedSignals(running):
        while running:
            for index, process in list(running.items()):
                lines, code = process.poll()
                for line in lines:
                    write(f"[{index}] {line}")
                if code is None:
                    continue
                del running[index]
                if code in (EXIT_PREEMPTED, EXIT_STOPPED):
                    stopped = code
                elif code and (not first or (code < 0 < first and not takedown.sent)):
                    # A killed process comes before one with an exit code, which may be just its consequence.
                    first = code
                    write(f"process {index} of {len(processes)} ({process.place}) {describe_exit(code)}")
                    takedown.begin()
            if running and (number := takedown.due()):
                write(f"sending {number.name} to process {', '.join(map(str, running))}")
                for process in running.values():
                    process.send_signal(number)
            time.sleep(_TICK_SECONDS)
    if first:
        return 128 - first if first < 0 else first
    return stopped


def describe_exit(code: int) -> str:
    """Describes the end of a process as a verb phrase."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Output:
    """Output that is given up where it breaks, as a terminal that is closed: the processes still have to be watched."""

    def __init__(self, write: Callable[[str], object]):
        self._write, self._open = write, True

    def __call__(self, line: str) -> None:
        try:
            if self._open:
                self._write(line)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._open = False


class _Takedown:
    """Schedule of the signals to the remaining processes, once one has failed."""

    def __init__(self, grace_period: float, clock: Callable[[], float]):
        self._grace_period, self._clock = grace_period, clock
        self._plan: list[tuple[float, signal.Signals]] = []
        self.sent = False

    def begin(self) -> None:
        if self._plan:
            return
        soon = self._clock() + self._grace_period
        self._plan = [(soon, signal.SIGTERM), (soon + self._grace_period, signal.SIGKILL)]

    def due(self) -> signal.Signals | None:
        if not self._plan or self._clock() < self._plan[0][0]:
            return None
        self.sent = True
        return self._plan.pop(0)[1]


class _ForwardedSignals:
    """Handlers that forward the signals to this process to every running one; active as a context manager."""

    def __init__(self, running: Mapping[int, SupervisedProcess]):
        self._running = running
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in heeded(_SIGNALS):
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            leave_terminal()
        # A copy: the handler interrupts the loop that removes ended processes.
        for process in list(self._running.values()):
            process.send_signal(number)
