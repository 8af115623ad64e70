"""Progress of a scan of all data on the terminal."""

import sys
import time

import typer

from lm_trainer.core.terminal import for_terminal

_SECONDS = 0.1
"""Between two updates."""


class ScanProgress:
    """Shows on a terminal how far a scan is, in one line of the standard error; elsewhere nothing.

    Args:
        what: is scanned, in the plural.
    """

    def __init__(self, what: str = "documents"):
        self._what, self._shown_at, self._is_shown = what, 0.0, False
        self._terminal = sys.stderr.isatty()

    def __call__(self, name: str, done: int, total: int) -> None:
        """Shows that of a cache so many items have been read."""
        now = time.monotonic()
        if not self._terminal or (now - self._shown_at < _SECONDS and done < total):
            return
        self._shown_at, self._is_shown = now, True
        share = 100 * done // max(total, 1)
        # What was shown before may be longer.
        typer.echo(f"\r{for_terminal(name)}: {done:,} of {total:,} {self._what} ({share}%)\033[K", err=True, nl=False)

    def clear(self) -> None:
        """Removes the line, so that something else can be printed in its place."""
        if self._is_shown:
            self._is_shown = False
            typer.echo("\r\033[K", err=True, nl=False)
