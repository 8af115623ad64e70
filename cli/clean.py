"""Output of the commands: the only place that writes to the terminal; control sequences are removed."""

from typing import Any

import typer

from lm_trainer.core.terminal import escape_for_terminal


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints text without control characters, which file names, run names, documents and foreign messages may hold."""
    typer.echo(escape_for_terminal(str(text)), err=err, nl=nl)


def secho(text: object, *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Prints a text in a style of `typer.secho`."""
    typer.secho(escape_for_terminal(str(text)), err=err, nl=nl, **style)
