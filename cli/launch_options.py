"""Options and helpers that several commands of `lmt launch` share."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import path_option
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig

option_without_default = partial(typer.Option, show_default=False)
"""An option whose help does not show a default."""

OutputFile = Annotated[
    Path | None,
    path_option("--output", show_default=False, metavar="FILE", help="Write to this file instead of stdout."),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of every process; repeatable."),
]
SpotOption = Annotated[
    bool, typer.Option("--spot", help="Use spot capacity, which is cheaper and can be preempted at any time.")
]


def check_device_count(run: "RunConfig", count: int) -> None:
    """Raises UserError if the run cannot use `count` devices, before the job waits in a queue for hours."""
    run.trainer.step_plan.check_device_count(count)


def write_or_submit(text: str, output: Path | None, submit: Callable[[str], str] | None) -> None:
    """Writes the text to `output`, submits it and prints the scheduler's reply, or both. Without either, prints it."""
    if output is not None:
        output.write_text(text)
        clean.echo(f"wrote {output}", err=True)
    if submit is not None:
        clean.echo(submit(text))
    elif output is None:
        clean.echo(text, nl=False)


def parse_pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Parses the values of an option that takes NAME=VALUE.

    Raises:
        UserError: for a text without `=`.
    """
    wrong = [text for text in texts or () if not re.match(r"[^=\s]+=", text)]
    if wrong:
        raise UserError(f"{option} {wrong[0]!r}: expected NAME=VALUE")
    return dict(text.split("=", 1) for text in texts or ())


def resource_name(config: Path) -> str:
    """Turns the name of a configuration file into a cloud resource name: lower-case letters, digits and `-`."""
    name = re.sub(r"[^a-z0-9]+", "-", config.stem.lower()).strip("-")
    return f"lmt-{name}"[:40].rstrip("-")
