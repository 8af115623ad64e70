"""Formats usage errors like all other errors, with hints for command names of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

OTHER_NAMES = {
    "evaluate": "lmt eval MODEL",
    "eval_harness": "lmt eval MODEL --tasks NAMES",
    "finetune": "lmt train CONFIG, with initialize_from_hf in the configuration (and adapter: for LoRA)",
    "pretrain": "lmt train CONFIG",
    "sft": "lmt train CONFIG, with data.format of type chat or supervised",
    "dpo": "lmt train CONFIG, with a loss section",
    "accelerate": "lmt train CONFIG on one machine, lmt launch on several",
    "resume": "lmt train CONFIG, the same command again",
    "convert": "lmt import-hf from transformers' files, lmt export-hf to them",
    "export": "lmt export-hf RUN DIRECTORY",
    "import": "lmt import-hf DIRECTORY CHECKPOINT for weights, lmt config import FILE for a configuration",
    "download": "lmt import-hf NAME CHECKPOINT",
    "upload": "lmt export-hf RUN DIRECTORY --push-to-hub ORG/NAME",
    "sample": "lmt generate MODEL --prompt TEXT",
    "inference": "lmt generate MODEL --prompt TEXT",
    "serve": "lmt export-hf RUN DIRECTORY, for a server such as vLLM",
    "tokenize": "lmt data build CONFIG",
    "preprocess": "lmt data build CONFIG",
    "prepare": "lmt data build CONFIG",
    "tokenizer": "lmt data train-tokenizer",
    "benchmark": "lmt bench",
    "profile": "lmt bench, or trainer.profiler=true for a run",
    "memory": "lmt plan CONFIG --devices 8xH100",
    "estimate": "lmt plan CONFIG --devices 8xH100",
    "list": "lmt runs",
    "ls": "lmt runs",
    "status": "lmt runs",
    "compare": "lmt diff RUN RUN for bits, lmt report RUN RUN for curves",
    "plot": "lmt config plot CONFIG for schedules, lmt report RUN for curves",
    "validate": "lmt config check CONFIG",
    "check": "lmt config check CONFIG",
    "init": "lmt config new FILE",
    "new": "lmt config new FILE",
    "slurm": "lmt launch slurm CONFIG",
    "torchrun": "lmt launch local CONFIG",
    "tune": "lmt sweep CONFIG KEY=VALUE,VALUE",
    "grid": "lmt sweep CONFIG KEY=VALUE,VALUE",
    "version": "lmt --version",
    "help": "lmt --help",
}
"""Maps names of commands in other programs, without `-` and `_`, to the equivalent command here."""

UsageError: Any = typer.BadParameter.__base__
"""click's UsageError. typer exports only classes that are derived from it."""


def find_equivalent_command(arguments: Sequence[str]) -> str | None:
    """Returns the command that is equivalent to an unknown command name; None if no equivalent is known."""
    name = arguments[0].lower().replace("_", "-") if arguments else ""
    equivalents = {key.replace("_", "-"): equivalent for key, equivalent in OTHER_NAMES.items()}
    return equivalents.get(name) or equivalents.get(name.replace("-", ""))


def wrong_command_error(name: str, equivalent: str) -> Any:
    """Returns the error for a command that has another name here."""
    return UsageError(f"no command {name!r}: here it is {equivalent}")


def describe_usage_error(error: Any) -> str:
    """Returns one line with the usage error and the help command; '' if only the help was requested."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    message = error.format_message().strip().rstrip(".").replace(". Did you mean", "; did you mean")
    if (option := getattr(error, "option_name", None)) and (near := getattr(error, "possibilities", None)):
        from lm_trainer.config.document import format_suggestions

        return f"{option}: no such option{format_suggestions(list(near))}"
    context = getattr(error, "ctx", None)
    more = "" if context is None or message.endswith("?") else f"; `{context.command_path} --help` tells more"
    return f"{message[:1].lower()}{message[1:]}{more}"
