"""Formats Python's log records like all other output: `warning: ...` on stderr, and each message only once."""

from __future__ import annotations

import logging

import typer

from cli import clean

_LIBRARIES = ("huggingface_hub",)
"""Libraries that also print their log records themselves."""


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Already shown above a progress bar.
        if getattr(record, "shown", False):
            return
        severe = record.levelno >= logging.ERROR
        clean.secho("error: " if severe else "warning: ", err=True, nl=False, fg=typer.colors.YELLOW)
        clean.echo(record.getMessage(), err=True)


def show_log_lines() -> None:
    """Shows all warnings of this project and of libraries in this format."""
    logging.basicConfig(level=logging.WARNING, handlers=[_LineHandler(logging.WARNING)])
    for name in _LIBRARIES:
        # Once it is imported, the library has its own handler, which is enough.
        logging.getLogger(name).propagate = False
