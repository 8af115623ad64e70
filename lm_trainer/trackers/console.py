"""Progress of a run at the terminal: a live bar, or plain lines if the output is not a terminal."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, Self, TextIO

from lm_trainer.core.terminal import for_terminal

_MODULES = logging.getLogger("lm_trainer.nn")
"""Modules of a model log here the choices that they make by themselves."""
_ALL = logging.getLogger("lm_trainer")
_MAX_LINE_STEPS = 1000


class Progress:
    """Progress of a run, and the choices that the modules of its model make by themselves; a context manager.

    The bar is drawn on a terminal that can move its cursor, unless LMT_PROGRESS=plain is set. Plain lines are written
    through at once, so that a log file is up to date. An output that breaks (`| head`, a full disk) is given up: it
    never stops a run.

    Args:
        total_steps: the last step.
        stream: takes the output; standard output by default.
        live: draw the bar; None decides by the stream and the environment.
        line_steps: steps between plain lines; None makes about 50 lines in a run.
        line_seconds: a plain line comes at least this often.
        clock: seconds that only grow.
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
        out = sys.stdout if stream is None else stream
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._encoding = getattr(out, "encoding", None) or "utf-8"
        if _wants_live(out) if live is None else live:
            # With rich, which only a terminal needs.
            from lm_trainer.trackers.bar import Bar

            self._view: _View = Bar(out, total_steps, clock)
        else:
            self._view = _Lines(out, total_steps, line_steps or _round_steps(total_steps), line_seconds, clock)
        self._open = True
        self._choices, self._before = _Notes(self.note), (_MODULES.level, _MODULES.propagate)
        self._warnings = _Notes(self.note, logging.WARNING)

    def __enter__(self) -> Self:
        self._before = (_MODULES.level, _MODULES.propagate)
        _MODULES.setLevel(logging.INFO)
        _MODULES.addHandler(self._choices)
        # Handlers that other libraries have put at the root would write the line a second time, through the bar.
        _MODULES.propagate = False
        _ALL.addHandler(self._warnings)
        return self

    def __exit__(self, *_: object) -> None:
        _ALL.removeHandler(self._warnings)
        _MODULES.removeHandler(self._choices)
        level, _MODULES.propagate = self._before
        _MODULES.setLevel(level)
        self.close()

    def note(self, text: str) -> None:
        """Writes a line that stays; characters that the output cannot encode are written as escapes, and those that a
        terminal would obey are replaced.
        """
        self._show(lambda: self._view.note(self._encodable(text)))

    def phase(self, text: str) -> None:
        """Shows the present activity until the next phase or step; may be called often, with figures that change."""
        self._show(lambda: self._view.phase(self._encodable(text)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step that is done, with those of its metrics that have a short form."""
        left = self._seconds_left(step)
        self._show(lambda: self._view.log(step, metrics, left))

    def close(self) -> None:
        """Leaves the terminal as it was; safe to call twice."""
        self._show(self._view.close)
        self._open = False

    def _encodable(self, text: str) -> str:
        return for_terminal(text).encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _seconds_left(self, step: int) -> float | None:
        """The time left, by the mean since the first step of this attempt, evaluations and saves included."""
        now = self._clock()
        # The first step has compiled the program, so the mean begins after it.
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return None
        first_step, first = self._first
        return (now - first) / (step - first_step) * (self._total - step)

    def _show(self, draw: Callable[[], None]) -> None:
        if not self._open:
            return
        try:
            draw()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._open = False


class _Notes(logging.Handler):
    def __init__(self, note: Callable[[str], None], level: int = logging.INFO):
        super().__init__(level)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        # So that handlers at the root need not show it a second time.
        record.shown = True
        severe = record.levelno >= logging.WARNING
        self._note(f"{'warning: ' if severe else ''}{record.getMessage()}")


class _View(Protocol):
    def note(self, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """Prints a line for a step after a number of steps, or of seconds."""

    def __init__(self, stream: TextIO, total: int, every: int, seconds: float, clock: Callable[[], float]):
        self._stream, self._total, self._every, self._seconds, self._clock = stream, total, every, seconds, clock
        self._step_shown = self._phase_shown = -math.inf
        self._phase = ""

    def note(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def phase(self, text: str) -> None:
        # Phases that differ in figures alone (`tokenised 3 of 8 files`) are one, shown again only after a while.
        kind = re.sub(r"[\d.,]+", "", text)
        if kind != self._phase or self._clock() - self._phase_shown >= self._seconds:
            self._phase, self._phase_shown = kind, self._clock()
            self.note(f"{text} ...")

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None:
        self._phase = ""
        now = self._clock()
        due = step % self._every == 0 or step == self._total or now - self._step_shown >= self._seconds
        if due:
            self._step_shown = now
            done = f"step {step}/{self._total} ({100 * step / self._total:.1f}%)"
            self.note(" | ".join([done, *describe(metrics, first=step <= 1), f"eta {duration(seconds_left)}"]))

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


def describe(
    metrics: Mapping[str, float], names: tuple[str, ...] = tuple(_FORMATS), *, first: bool = False
) -> list[str]:
    """Formats the metrics that have a short form, in the order of `names`; `first`: of the first step of a run."""
    shown = {name: _FORMATS[name](metrics[name]) for name in names if name in metrics}
    # A warm-up begins with a step that changes nothing.
    if first and metrics.get("optim/learning_rate") == 0 and "optim/learning_rate" in shown:
        shown["optim/learning_rate"] += " (warm-up)"
    return [*shown.values()]


def duration(seconds: float | None) -> str:
    """Formats a duration as `1d03h`, `2h05m`, `3m07s` or `12s`; `?` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _wants_live(stream: TextIO) -> bool:
    plain = os.environ.get("LMT_PROGRESS") == "plain" or os.environ.get("TERM") in ("dumb", "unknown")
    return not plain and stream.isatty()


def _round_steps(total: int) -> int:
    """The least of 1, 2, 5, 10, 20, ... that makes at most 50 lines, but not over 1000."""
    sizes = (digit * 10**power for power in range(4) for digit in (1, 2, 5))
    return next((size for size in sizes if size * 50 >= total or size >= _MAX_LINE_STEPS), _MAX_LINE_STEPS)
