"""Watchdog of a run: detects that a run makes no progress, and dumps the stacks of all threads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

from pydantic import field_validator

from lm_trainer.core.config import Config, Duration
from lm_trainer.core.errors import EXIT_PREEMPTED

T = TypeVar("T")


class WatchdogConfig(Config):
    """Reaction to a run that hangs, for example because of a dead mount, a lost machine or a deadlock."""

    timeout: Duration | None = timedelta(minutes=10)
    """Maximum time for a step, a batch, an evaluation or a checkpoint. After it, the run reports the operation it is
    waiting for and appends the stacks of all threads to RUN_DIR/stacks.txt. null turns the watchdog off. Compilation
    and reading data at the start are not timed."""
    abort: bool = False
    """After the timeout, also end the process with exit code 75, so that a scheduler restarts it from its newest
    checkpoint."""

    @field_validator("timeout")
    @classmethod
    def _positive(cls, value: timedelta | None) -> timedelta | None:
        if value is not None and value <= timedelta(0):
            raise ValueError("expected a positive duration such as 10m, or null for no watchdog")
        return value


class Watchdog:
    """Context manager with a background thread that times the operation the run is waiting for.

    Time during which the process was stopped or the machine was suspended does not count.

    Args:
        config: the timeout, and whether to abort after the warning.
        directory: directory to write the stacks to. If it is not writable, they go to standard error.
        clock: monotonic clock in seconds.
        exit: ends the process with an exit code. The default runs no cleanup, because cleanup could hang too.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        directory: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        exit: Callable[[int], object] = os._exit,
    ):
        self._timeout = None if config.timeout is None else config.timeout.total_seconds()
        # Frequent enough that a warning is at most a quarter of the timeout late, and rare enough to cost nothing.
        self._interval = min((self._timeout or 0.0) / 4, 10.0)
        self._abort, self._directory, self._clock, self._exit = config.abort, directory, clock, exit
        # Operation and start time are one tuple, so that the thread never sees a partial update. The assignment needs
        # no lock.
        self._wait: tuple[str, float] | None = None
        self._reported: tuple[str, float] | None = None
        self._checked = self._awake_since = clock()
        self._ended = threading.Event()
        self.on_stall: Callable[[str], object] = lambda _: None
        """Called with the warning, in the watchdog's thread."""
        # A daemon thread, because a run that ends with an exception must not wait for its watchdog.
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._timeout is not None:
            self._checked = self._awake_since = self._clock()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def arm(self, operation: str) -> None:
        """Starts timing the given operation, which the warning names, and stops timing the previous one."""
        self._wait = (operation, self._clock())

    def disarm(self) -> None:
        """Stops timing, because the next operation, such as a compilation, may take any amount of time."""
        self._wait = None

    def time_items(self, items: Iterable[T], operation: str) -> Iterator[T]:
        """Yields the items, and times how long it takes to fetch and to use each of them."""
        for item in items:
            self.arm(operation)
            yield item
        self.arm(operation)

    def check(self) -> None:
        """Warns if the current operation has exceeded the timeout, once per operation."""
        time_now, wait = self._clock(), self._wait
        # A check this late means the process was paused (SIGSTOP, suspend); the run does not hang.
        if time_now - self._checked > 2 * self._interval + 1:
            self._awake_since = time_now
        self._checked = time_now
        if wait is None or self._timeout is None or wait is self._reported:
            return
        age = time_now - max(wait[1], self._awake_since)
        if age >= self._timeout:
            self._reported = wait
            self._warn(wait[0], age)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            self.check()

    def _warn(self, operation: str, age: float) -> None:
        text = f"no progress for {age:.0f} s, waiting for {operation}"
        stacks = self._write_stacks(text)
        if self._abort:
            outcome = f"ending with exit code {EXIT_PREEMPTED}; the same command goes on from the newest checkpoint"
        else:
            outcome = "the run waits on (trainer.watchdog.abort: true would end it)"
        _write_unbuffered(2, f"\nwatchdog: {text}; the stacks of all threads are {stacks}; {outcome}\n".encode())
        self.on_stall(text)
        if self._abort:
            self._exit(EXIT_PREEMPTED)

    def _write_stacks(self, text: str) -> str:
        import jax

        index = jax.process_index()
        file = self._directory / ("stacks.txt" if index == 0 else f"stacks.{index}.txt")
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"=== {time.strftime('%Y-%m-%dT%H:%M:%S%z')} process {os.getpid()}: {text}\n")
                # `faulthandler` writes to the descriptor, bypassing the buffer of the stream.
                stream.flush()
                faulthandler.dump_traceback(stream, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(2, all_threads=True)
            return "above"
        return f"in {file}"


def _write_unbuffered(descriptor: int, text: bytes) -> None:
    """Writes directly to a file descriptor, because a hanging thread may hold the lock of the stream."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text)
