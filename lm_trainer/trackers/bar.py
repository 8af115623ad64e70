"""Live progress bar of a run in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from lm_trainer.trackers.console import format_long_duration, format_metrics

# Minimum time between two redraws, which limits the cost of drawing when steps are short.
_DRAW_SECONDS = 0.25


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises an exception, unlike the method of rich, which ends the process."""
        raise BrokenPipeError


class Bar:
    """A progress bar at the bottom of the terminal, with notes that scroll above it.

    Only the caller's thread draws it.
    """

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float]):
        self._total, self._clock, self._drawn = total, clock, -math.inf
        self._console = _Console(file=stream, force_terminal=True)
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            expand=True,
            # Without a refresh thread, because it would draw while another library writes to the terminal.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("starting", total=total, status="")

    def note(self, text: str) -> None:
        self._bar.start()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=f"{text} ...", status="")
        self._draw(force=True)

    def log(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None:
        shown = format_metrics(metrics, names=("train/loss", "throughput/tokens_per_second", "throughput/mfu"))
        status = " | ".join([*shown, f"eta {format_long_duration(seconds_left)}"])
        self._bar.update(self._task, completed=step, description="training", status=status)
        self._draw(force=step == self._total)

    def close(self) -> None:
        self._bar.stop()

    def _draw(self, *, force: bool) -> None:
        self._bar.start()
        if force or self._clock() - self._drawn >= _DRAW_SECONDS:
            self._drawn = self._clock()
            self._bar.refresh()
