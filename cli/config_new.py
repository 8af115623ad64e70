"""`lmt config new`: writes a first configuration."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import clean
from cli.common import path_argument
from lm_trainer.core.errors import UserError

_DEFAULTS = {"model": "llama", "size": "15M", "data": "python", "devices": "1xcpu"}


def new(
    file: Annotated[Path, path_argument(metavar="FILE", help="YAML file to write.", show_default=False)],
    model: Annotated[
        str | None, typer.Option("--model", metavar="FAMILY", help="llama, qwen3, olmo2, olmo3 or gpt2.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", metavar="SIZE", help="15M, 125M, 350M, 1B, 3B or 8B parameters.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Files (quote a glob), a data set on the hub (org/name), or python for the text that Python includes.",
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="COUNTxKIND", help="Devices, such as 8xH100 or 1xcpu.")
    ] = None,
) -> None:
    """Write a first configuration, for a model, a size, data and devices.

    In a terminal, asks for what the options leave out. Otherwise, takes llama, 15M, python and 1xcpu. The file has the
    number of training steps for 20 tokens per parameter, and a batch and a learning rate that suit the size. Full
    recipes of published models are in configs/: llama_8b, olmo2_7b, gpt2_124m and others.

    Examples:
        lmt config new my.yaml

        lmt config new my.yaml --model llama --size 1B --data 'text/*.jsonl' --devices 8xH100
    """
    from lm_trainer.core.files import write_atomically
    from lm_trainer.run.config.first_file import FAMILIES, SIZES, Choices, repetition_note, write_first_file

    if file.exists():
        raise UserError(f"{file}: there is such a file already; choose another name, or remove it")
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file}: a configuration is a YAML file; write {file}.yaml")
    questions = {
        "model": (model, f"Model family ({', '.join(FAMILIES)})"),
        "size": (size, f"Parameters ({', '.join(SIZES)})"),
        "data": (data, "Data: files, a data set on the hub (org/name), or python for the text that Python includes"),
        "devices": (devices, "Devices, such as 8xH100 or 1xcpu"),
    }
    answers = {name: option or _ask(question, _DEFAULTS[name]) for name, (option, question) in questions.items()}
    choices = Choices(answers["model"], answers["size"], answers["data"], answers["devices"])
    write_atomically(file, write_first_file(choices, str(file)))
    if (note := repetition_note(choices)) is not None:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    clean.echo(f"wrote {file}; next: lmt plan {file} --devices {choices.devices}, lmt train {file}")


def _ask(question: str, default: str) -> str:
    if not sys.stdin.isatty():
        return default
    clean.echo(f"{question} [{default}]: ", nl=False)
    return input().strip() or default
