"""Shows the progress of a scan over all data on the terminal."""

import sys
import time

import typer

from lm_trainer.core.terminal import escape_for_terminal

_SECONDS = 0.1
"""Minimum time between two updates, in seconds."""


class ScanProgress:
    """Shows the progress of a scan in one line on stderr, if stderr is a terminal.

    Args:
        items: plural name of the scanned items.
    """

    def __init__(self, items: str = "documents"):
        self._items, self._shown_at, self._is_shown = items, 0.0, False
        self._terminal = sys.stderr.isatty()

    def __call__(self, name: str, done: int, total: int) -> None:
        """Shows how many items of a cache have been read."""
        time_now = time.monotonic()
        if not self._terminal or (time_now - self._shown_at < _SECONDS and done < total):
            return
        self._shown_at, self._is_shown = time_now, True
        share = 100 * done // max(total, 1)
        # Clears the rest of the line, because the previous text may have been longer.
        typer.echo(
            f"\r{escape_for_terminal(name)}: {done:,} of {total:,} {self._items} ({share}%)\033[K", err=True, nl=False
        )

    def clear(self) -> None:
        """Clears the line, so that other output can replace it."""
        if self._is_shown:
            self._is_shown = False
            typer.echo("\r\033[K", err=True, nl=False)
