"""Watches the processes of a run: passes on what they print, and stops all when one of them fails."""

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

from lm_trainer.core.errors import EXIT_PREEMPTED

PATIENCE = 15.0
"""Seconds that the others have to end by themselves after one has failed, and again to end when asked to."""

_TICK_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
# A program of its own, since a function between fork and exec may deadlock in a process with threads.
_END_WITH_PARENT = (
    sys.executable,
    "-Sc",
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Status(NamedTuple):
    """What a process has done since it was asked last."""

    lines: list[str]
    """What it printed, without line ends."""
    code: int | None
    """None while it runs; its exit code; or, of one that a signal ended, the number of the signal, negative."""


class Member(Protocol):
    """One process of a run, wherever it is."""

    @property
    def place(self) -> str:
        """For people: `pid 17` or `host a, pid 17`."""
        ...

    def poll(self) -> Status:
        """Returns at once."""
        ...

    def send(self, number: int) -> None:
        """Sends it a signal; does nothing when it has ended."""
        ...


class Child:
    """A `Member` on this machine. It is asked to stop when the process that started it dies.

    It has a session of its own, so that Ctrl-C reaches it once, through `send`, and not from the terminal as well.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], directory: str):
        self._process = subprocess.Popen(
            [*_END_WITH_PARENT, *command] if sys.platform == "linux" else command,
            env=dict(environ),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)

    @property
    def place(self) -> str:
        return f"pid {self._process.pid}"

    def poll(self) -> Status:
        if self._reader.ident is None:
            self._reader.start()
        code = self._process.poll()
        if code is not None:
            # What it started may hold its output open after it.
            self._reader.join(_DRAIN_SECONDS)
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return Status(lines, code)

    def send(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.decode(errors="replace").rstrip("\r\n"))


def free_address(host: str = "127.0.0.1") -> str:
    """`host:port` that nothing listens on."""
    with socket.socket() as server:
        server.bind((host, 0))
        return f"{host}:{server.getsockname()[1]}"


def supervise(
    members: Sequence[Member],
    write: Callable[[str], object],
    *,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Runs until all members have ended.

    Signals to this process are passed on, each once to every member. The first member that fails takes the others
    down: they are given time to end by themselves, then asked to, then killed.

    Args:
        members: the processes, by their number in the run.
        write: takes each line of output, with the number of its process in front, and what else there is to say.
        patience: see `PATIENCE`.
        clock: seconds that only grow.

    Returns:
        The exit code of the first that failed, or, of one that a signal ended before any was sent to it from here,
        128 + the number of the signal: another one may miss it, and fail for that reason, before its end is seen here.
        Where none failed, 75 if any was stopped with everything saved, else 0.
    """
    running = dict(enumerate(members))
    takedown = _Takedown(patience, clock)
    first, stopped = 0, False
    with _PassedOn(running):
        while running:
            for index, member in list(running.items()):
                lines, code = member.poll()
                for line in lines:
                    write(f"[{index}] {line}")
                if code is None:
                    continue
                del running[index]
                stopped |= code == EXIT_PREEMPTED
                if code not in (0, EXIT_PREEMPTED) and (not first or (code < 0 < first and not takedown.sent)):
                    first = code
                    write(f"process {index} of {len(members)} ({member.place}) {describe(code)}")
                    takedown.begin()
            if running and (number := takedown.due()):
                write(f"sending {number.name} to process {', '.join(map(str, running))}")
                for member in running.values():
                    member.send(number)
            time.sleep(_TICK_SECONDS)
    if first:
        return 128 - first if first < 0 else first
    return EXIT_PREEMPTED if stopped else 0


def describe(code: int) -> str:
    """How a process ended, as a verb phrase."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Takedown:
    """What is sent to the others, and when, once one has failed."""

    def __init__(self, patience: float, clock: Callable[[], float]):
        self._patience, self._clock = patience, clock
        self._plan: list[tuple[float, signal.Signals]] = []
        self.sent = False

    def begin(self) -> None:
        if self._plan:
            return
        soon = self._clock() + self._patience
        self._plan = [(soon, signal.SIGTERM), (soon + self._patience, signal.SIGKILL)]

    def due(self) -> signal.Signals | None:
        if not self._plan or self._clock() < self._plan[0][0]:
            return None
        self.sent = True
        return self._plan.pop(0)[1]


class _PassedOn:
    """While active, a signal to this process goes to every running member instead."""

    def __init__(self, running: Mapping[int, Member]):
        self._running = running
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        for member in list(self._running.values()):
            member.send(number)
