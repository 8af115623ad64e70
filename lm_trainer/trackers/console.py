"""Shows the progress of a run: a live bar in a terminal, or plain lines if the output is not a terminal."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, Self, TextIO

from lm_trainer.core.terminal import escape_for_terminal

_MODULES = logging.getLogger("lm_trainer.nn")
"""Logger to which the modules of a model log their automatic choices."""
_ALL = logging.getLogger("lm_trainer")
_MAX_LINE_STEPS = 1000


class Progress:
    """Context manager that shows the progress of a run, warnings, and the automatic choices of the model's modules.

    A bar is drawn on a terminal with cursor control, unless LMT_PROGRESS=plain is set. Plain lines are flushed
    immediately, to keep log files up to date. After an output error (`| head`, a full disk), nothing more is written,
    but the run continues.

    Args:
        total_steps: number of the last step.
        stream: the output stream; None means standard output.
        live: True to draw a bar, False to write plain lines; None chooses according to the stream and the environment.
        line_steps: number of steps between plain lines; None results in about 50 lines per run.
        line_seconds: maximum time in seconds between plain lines.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        line_steps: int | None = None,
        line_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        output = sys.stdout if stream is None else stream
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._encoding = getattr(output, "encoding", None) or "utf-8"
        if _supports_live_display(output) if live is None else live:
            # This module imports rich, which is only needed in a terminal.
            from lm_trainer.trackers.bar import Bar

            self._view: _View = Bar(output, total_steps, clock)
        else:
            self._view = _LineView(
                output, total_steps, line_steps or _choose_line_interval(total_steps), line_seconds, clock
            )
        self._open = True
        self._choices, self._previous_state = _NoteHandler(self.note), (_MODULES.level, _MODULES.propagate)
        self._warnings = _NoteHandler(self.note, logging.WARNING)

    def __enter__(self) -> Self:
        self._previous_state = (_MODULES.level, _MODULES.propagate)
        _MODULES.setLevel(logging.INFO)
        _MODULES.addHandler(self._choices)
        # Handlers that other libraries add to the root logger would write the line a second time and break the bar.
        _MODULES.propagate = False
        _ALL.addHandler(self._warnings)
        return self

    def __exit__(self, *_: object) -> None:
        _ALL.removeHandler(self._warnings)
        _MODULES.removeHandler(self._choices)
        level, _MODULES.propagate = self._previous_state
        _MODULES.setLevel(level)
        self.close()

    def note(self, text: str) -> None:
        """Writes a permanent line.

        Escapes characters that cannot be encoded, and replaces terminal control characters.
        """
        self._draw_if_open(lambda: self._view.note(self._make_encodable(text)))

    def phase(self, text: str) -> None:
        """Shows the current activity until the next phase or step. May be called often, with changing numbers."""
        self._draw_if_open(lambda: self._view.phase(self._make_encodable(text)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a completed step, with the metrics that have a short form."""
        left = self._seconds_left(step)
        self._draw_if_open(lambda: self._view.log(step, metrics, left))

    def close(self) -> None:
        """Restores the terminal. Calling it twice is safe."""
        self._draw_if_open(self._view.close)
        self._open = False

    def _make_encodable(self, text: str) -> str:
        return escape_for_terminal(text).encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _seconds_left(self, step: int) -> float | None:
        """Estimates the remaining time from the mean step time of this attempt, including evaluations and saves."""
        timestamp = self._clock()
        # The first step includes compilation, so the mean starts after it.
        if self._first is None or step <= self._first[0]:
            self._first = (step, timestamp)
            return None
        first_step, first = self._first
        return (timestamp - first) / (step - first_step) * (self._total - step)

    def _draw_if_open(self, draw: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            draw()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._open = False


class _NoteHandler(logging.Handler):
    def __init__(self, note: Callable[[str], None], level: int = logging.INFO):
        super().__init__(level)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        # Tells the handlers of the root logger not to show the record a second time.
        record.shown = True
        severe = record.levelno >= logging.WARNING
        self._note(f"{'warning: ' if severe else ''}{record.getMessage()}")


class _View(Protocol):
    def note(self, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None: ...

    def close(self) -> None: ...


class _LineView:
    """Prints a line whenever a number of steps or a time has passed."""

    def __init__(self, stream: TextIO, total: int, every: int, seconds: float, clock: Callable[[], float]):
        self._stream, self._total, self._every, self._seconds, self._clock = stream, total, every, seconds, clock
        self._step_shown = self._phase_shown = -math.inf
        self._phase = ""

    def note(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def phase(self, text: str) -> None:
        # Texts that differ only in their numbers (`tokenised 3 of 8 files`) are the same phase, which is shown
        # repeatedly only after some time.
        kind = re.sub(r"[\d.,]+", "", text)
        if kind != self._phase or self._clock() - self._phase_shown >= self._seconds:
            self._phase, self._phase_shown = kind, self._clock()
            self.note(f"{text} ...")

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None:
        self._phase = ""
        timestamp = self._clock()
        due = step % self._every == 0 or step == self._total or timestamp - self._step_shown >= self._seconds
        if due:
            self._step_shown = timestamp
            done = f"step {step}/{self._total} ({100 * step / self._total:.1f}%)"
            self.note(
                " | ".join(
                    [done, *format_metrics(metrics, first=step <= 1), f"eta {format_long_duration(seconds_left)}"]
                )
            )

    def close(self) -> None:
        pass


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "train/loss": "loss {:.4f}".format,
    "optim/learning_rate": "lr {:.3g}".format,
    "optim/grad_norm": "grad_norm {:.3g}".format,
    "throughput/step_time": lambda seconds: f"{seconds * 1000:.0f} ms/step",
    "throughput/tokens_per_second": "{:,.0f} tok/s".format,
    "throughput/mfu": "mfu {:.1f}%".format,
}


def format_metrics(
    metrics: Mapping[str, float], names: tuple[str, ...] = tuple(_FORMATS), *, first: bool = False
) -> list[str]:
    """Formats the metrics that have a short form, in the order of `names`.

    `first` is True for the first step of a run.
    """
    shown = {name: _FORMATS[name](metrics[name]) for name in names if name in metrics}
    # The first step of a warm-up has a learning rate of 0.
    if first and metrics.get("optim/learning_rate") == 0 and "optim/learning_rate" in shown:
        shown["optim/learning_rate"] += " (warm-up)"
    return [*shown.values()]


def format_long_duration(seconds: float | None) -> str:
    """Formats a duration as `1d03h`, `2h05m`, `3m07s` or `12s`. Returns `?` if it is None or not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, seconds_part = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds_part:02}s" if minutes else f"{seconds_part}s"


def _supports_live_display(stream: TextIO) -> bool:
    plain = os.environ.get("LMT_PROGRESS") == "plain" or os.environ.get("TERM") in ("dumb", "unknown")
    return not plain and stream.isatty()


def _choose_line_interval(total: int) -> int:
    """Returns the smallest of 1, 2, 5, 10, 20, ... that results in at most 50 lines, but at most 1000."""
    sizes = (digit * 10**power for power in range(4) for digit in (1, 2, 5))
    return next((size for size in sizes if size * 50 >= total or size >= _MAX_LINE_STEPS), _MAX_LINE_STEPS)
