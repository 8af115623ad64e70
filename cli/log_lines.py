"""Formats Python's log records as all other output: `warning: ...` on stderr, each message once."""

from __future__ import annotations

import logging

import typer

from cli import clean

_LIBRARIES = ("huggingface_hub",)
"""Libraries that also print their records themselves."""


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Shown above a progress bar already.
        if getattr(record, "shown", False):
            return
        severe = record.levelno >= logging.ERROR
        clean.secho("error: " if severe else "warning: ", err=True, nl=False, fg=typer.colors.YELLOW)
        clean.echo(record.getMessage(), err=True)


def show_log_lines() -> None:
    """Shows every warning in this format, from this project and from libraries."""
    logging.basicConfig(level=logging.WARNING, handlers=[_LineHandler(logging.WARNING)])
    for name in _LIBRARIES:
        # Once imported, the library has its own handler, which is enough.
        logging.getLogger(name).propagate = False
