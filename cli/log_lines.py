"""Lines of Python's logging in the form of all other output: `warning: ...` on stderr, each once."""

from __future__ import annotations

import logging

import typer

from cli import clean

_LIBRARIES = ("huggingface_hub",)
"""Libraries that write their lines themselves as well."""


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # What a progress bar has shown above itself.
        if getattr(record, "shown", False):
            return
        severe = record.levelno >= logging.ERROR
        clean.secho("error: " if severe else "warning: ", err=True, nl=False, fg=typer.colors.YELLOW)
        clean.echo(record.getMessage(), err=True)


def show_log_lines() -> None:
    """Has every warning shown in that form, from this project and from libraries."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Lines(logging.WARNING)])
    for name in _LIBRARIES:
        # Its own handler is there once it is imported, and is all that is needed.
        logging.getLogger(name).propagate = False
