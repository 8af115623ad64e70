"""Refusal of URLs by every argument that takes a path, found by walking the commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import typer

from cli.main import app
from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from tests.conftest import Lmt

URL = "gs://b/x"
NOWHERE = "az://b/x"
"""Refused everywhere: there is no driver for it."""
TAKE_BUCKETS = (
    *(f"{command} {URL}" for command in ("verify", "replay", "diff", "diff x", "report", "tokens", "tokens x")),
    f"data find {URL}",
    f"data overlap {URL}",
    f"branch --at 1 {URL}",
    *(f"bisect {command} {URL}" for command in ("runs", "runs x", "spike --step 1", "code --step 1")),
    f"without {URL}",
    *(f"ladder {command} {URL}" for command in ("mixture", "rate")),
    f"prove --output x --key x {URL}",
    *(f"{command} {URL}" for command in ("chat", "eval", "generate", "export-hf", "export-hf x", "transcribe")),
)
"""Command lines that read or write runs and exports in object storage."""
NO_PATHS = {"KEY=VALUE", "[TEXT]", "EVAL", "NAME", "DOCUMENT"}
"""Arguments that are no path, or text that may lie anywhere; options are one if their values are called so."""
PATH_NAMES = {"DIR", "DIRECTORY", "FILE", "FIT.json", "FILE.html"}


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


def path_arguments() -> Iterator[tuple[str, ...]]:
    """Command lines with a URL in the place of one path, and other arguments before it as far as they are needed."""
    for names, command in commands(typer.main.get_command(app)):
        arguments_before: list[str] = [
            word
            for parameter in command.params
            if parameter.required and parameter.param_type_name == "option"
            for word in (parameter.opts[0], "1" if parameter.metavar in ("N", "STEP") else "x")
        ]
        types = get_type_hints(inspect.unwrap(command.callback))
        for parameter in command.params:
            positional = parameter.param_type_name == "argument"
            if positional and parameter.metavar not in NO_PATHS:
                yield (*names, *arguments_before, URL)
                arguments_before.append("x")
            elif not positional and ("Path" in str(types.get(parameter.name)) or parameter.metavar in PATH_NAMES):
                yield (*names, *arguments_before, parameter.opts[0], URL)


LINES = [*path_arguments()]


def test_the_walk_finds_what_takes_a_path() -> None:
    command_lines = {" ".join(line) for line in LINES}
    assert len(command_lines) > 40
    assert command_lines >= {
        f"train {URL}",
        f"export-hf {URL}",
        f"export-hf x {URL}",
        f"import-hf {URL}",
        f"import-hf x x --tokenizer {URL}",
        f"generate x --prompt-file {URL}",
        f"diff x {URL}",
        f"config diff x {URL}",
        f"verify {URL}",
        f"replay x --dump-grads {URL}",
        f"data train-tokenizer x --output {URL}",
        f"launch slurm x --output {URL}",
        f"ladder metrics x --alternative-dir {URL}",
        f"ladder report x --out {URL}",
    }


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_url_is_refused_before_anything_is_done(lmt: Lmt, line: tuple[str, ...]) -> None:
    url = NOWHERE if " ".join(line) in TAKE_BUCKETS else URL
    done = lmt(*(url if part == URL else part for part in line))
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert f": {url} is a URL, and only a path on this machine" in error
    assert "data.cache_dir" in error
    assert done.stdout == ""
    assert not [*Path.cwd().iterdir()]


def _export(out: Any) -> None:
    from lm_trainer.export.output import atomic_directory

    with atomic_directory(out, overwrite=False, replaceable=()):
        pass


def _read_run(run: Any) -> None:
    from lm_trainer.reproduce.record import RunRecord

    RunRecord.read(run)


def _load_model(run: Any) -> None:
    from lm_trainer.run.weights.saved_model import load_model

    load_model(run)


def _open_model(source: Any) -> None:
    from lm_trainer.run.weights.open_model import open_model

    open_model(source)


def _fetch(source: Any) -> None:
    from lm_trainer.run.weights.hf_transfer import fetch_directory

    fetch_directory(str(source))


def _import(out: Any) -> None:
    from lm_trainer.run.weights.hf_transfer import import_model

    import_model("x", out)


def _points(path: Any) -> None:
    from lm_trainer.ladder.fit.points import read_table

    read_table(path)


def _metrics(path: Any) -> None:
    from lm_trainer.ladder.metrics import write_rows

    write_rows([{"size": "1k", "loss": np.float32(1)}], "csv", path)


def _picture(path: Any) -> None:
    from lm_trainer.ladder.recipe import WSDSChinchillaRunConfigurator

    WSDSChinchillaRunConfigurator(chinchilla_multiple=1).plot_lr_schedule(10**6, 2**16, show=False, save_path=path)


@pytest.mark.parametrize(
    "use",
    [
        *(_export, _read_run, _load_model, _open_model, _fetch, _import, _points, _metrics, _picture),
        ByteTokenizer().save,
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_functions_refuse_urls(in_tmp_path: Path, use: Callable[[Any], Any], kind: Any) -> None:
    with pytest.raises(UserError, match="is a URL, and only a path"):
        use(kind(NOWHERE))
    assert not [*in_tmp_path.iterdir()]
