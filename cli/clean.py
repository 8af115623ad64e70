"""Output of the commands. This is the only module that writes to the terminal; it removes control sequences."""

from typing import Any

import typer

from lm_trainer.core.terminal import escape_for_terminal


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints text without control characters, which file names, run names, documents and messages may contain."""
    typer.echo(escape_for_terminal(str(text)), err=err, nl=nl)


def secho(text: object, *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Prints text like `echo`, with the styles of `typer.secho`."""
    typer.secho(escape_for_terminal(str(text)), err=err, nl=nl, **style)
