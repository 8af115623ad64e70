"""Shows the progress of a run in a notebook: the curve of the loss, which grows below the cell."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.html_table import curve_svg
from lm_trainer.trackers.console import Progress, format_long_duration, format_metrics

_NOTES = 200
"""Number of notes that are shown; older ones are dropped."""


class NotebookProgress(Progress):
    """Progress of a run below a cell of a notebook: the curve of the loss, the newest step, and the notes.

    Args:
        total_steps: number of the last step.
        seconds: time between two pictures.
        clock: monotonic clock in seconds.

    Raises:
        UserError: outside of a notebook, where IPython is not installed.
    """

    def __init__(self, total_steps: int, *, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic):
        super().__init__(total_steps, live=False, clock=clock)
        self._view = _NotebookView(total_steps, seconds, clock)


class _NotebookView:
    def __init__(self, total: int, seconds: float, clock: Callable[[], float]):
        try:
            from IPython.display import HTML, display
        except ImportError:
            raise UserError(
                "NotebookProgress needs IPython, which every notebook has; use Progress elsewhere"
            ) from None
        self._total, self._seconds, self._clock = total, seconds, clock
        self._html, self._display = HTML, display
        self._handle: Any = None
        self._drawn = -math.inf
        self._notes: list[str] = []
        self._points: list[tuple[float, float]] = []
        self._line = ""

    def note(self, text: str) -> None:
        self._notes = [*self._notes, text][-_NOTES:]
        self._draw_if_due()

    def phase(self, text: str) -> None:
        self._line = f"{text} ..."
        self._draw_if_due()

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None:
        loss = metrics.get("train/loss", math.nan)
        if math.isfinite(loss):
            self._points.append((step, loss))
        parts = [f"step {step}/{self._total}", *format_metrics(metrics), f"eta {format_long_duration(seconds_left)}"]
        self._line = " | ".join(parts)
        self._draw_if_due()

    def close(self) -> None:
        self._draw()

    def _draw_if_due(self) -> None:
        if self._clock() - self._drawn >= self._seconds:
            self._draw()

    def _draw(self) -> None:
        self._drawn = self._clock()
        notes = html.escape("\n".join(self._notes))
        curve = curve_svg(self._points, "train/loss") if len(self._points) > 1 else ""
        page = self._html(
            f"{curve}<div>{html.escape(self._line)}</div>"
            f"<details><summary>{len(self._notes)} notes</summary><pre>{notes}</pre></details>"
        )
        if self._handle is None:
            self._handle = self._display(page, display_id=True)
        else:
            self._handle.update(page)
