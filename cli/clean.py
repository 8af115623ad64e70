"""Output of the commands: the one place where text reaches the terminal, rid of what a terminal would obey."""

from typing import Any

import typer

from lm_trainer.core.terminal import for_terminal


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints a text: names of files and runs, documents and messages of others may hold control characters."""
    typer.echo(for_terminal(str(text)), err=err, nl=nl)


def secho(text: object, *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Prints a text in a style of `typer.secho`."""
    typer.secho(for_terminal(str(text)), err=err, nl=nl, **style)
