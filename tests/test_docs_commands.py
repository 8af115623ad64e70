"""Every `lmt` command on every page exists, with its options, their values, and the keys that it sets."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from cli.completion import config_keys
from cli.main import app
from docs.generate.speed import measuring_commands
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
USAGE = cast(type[Exception], typer.BadParameter.__bases__[0])
"""Base class of all refusals of a command line."""


def commands_of(text: str) -> Iterator[str]:
    """The `lmt` commands in the blocks of shell commands of a page, without comments, pipes and redirections."""
    for block in re.findall(r"```(?:bash|console|sh)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;]", line):
                words = re.sub(r"(^|\s)#.*|[12]?>.*|<<?.*|&$", "", part).strip()
                if match := re.match(r"(?:\$ )?(?:\w+=\S+ )*((?:\S*/)?lmt\s.+|lmt$)", words):
                    yield match[1]


def find_command(words: list[str]) -> tuple[str, Any, list[str]]:
    """The command that words name, and its own words.

    Raises:
        AssertionError: if there is no such command.
    """
    command: Any = typer.main.get_command(app)
    path = "lmt"
    while getattr(command, "commands", None):
        if not words or words[0].startswith("-"):
            return path, command, words
        name, *words = words
        assert name in command.commands, f"{path} has no command {name}"
        command, path = command.commands[name], f"{path} {name}"
    return path, command, words


def check(text: str) -> None:
    """Raises `USAGE` or `AssertionError` for a command that would be refused before it reads any file."""
    path, command, words = find_command(shlex.split(text)[1:])
    context = typer.Context(command, info_name=path, **command.context_settings)
    values, arguments, _ = command.make_parser(context).parse_args([*words])
    for parameter in command.params:
        value = values.get(parameter.name)
        if parameter.param_type_name == "option" and isinstance(value, str | list):
            parameter.process_value(context, value)
        elif parameter.param_type_name == "argument" and parameter.required:
            assert value, f"{text}: {parameter.name} is missing"
    settings = [*arguments, *(values.get("overrides") or ())]
    for key in re.findall(r"^(?:--(?=\w+\.)|(?=\S+=))([a-z_]+(?:\.\w+)*)(?:=|$)", "\n".join(settings), re.MULTILINE):
        assert is_key(key), f"{text}: there is no key {key}"
    unknown = [word for word in settings if word.startswith("--") and not re.match(r"--[a-z_]+[.=]", word)]
    assert not unknown, f"{text}: {unknown}"


@functools.cache
def leaves_and_sections() -> tuple[frozenset[str], frozenset[str]]:
    keys = config_keys()
    sections = frozenset(key[: match.start()] for key in keys for match in re.finditer(r"\.", key))
    return frozenset(keys) - sections, sections


def is_key(key: str) -> bool:
    """True for a key of a run or one of its sections, and for a name below a key, as in `trainer.jax_config.NAME`."""
    leaves, sections = leaves_and_sections()
    above = {key[: match.start()] for match in re.finditer(r"\.", key)}
    return key in leaves | sections or bool(above & leaves)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    # The other generated page with commands is made from the command line itself.
    text = f"{written}\n{measuring_commands()}" if "<!-- generated: measuring commands -->" in written else written
    problems = []
    for command in commands_of(text):
        try:
            check(command)
        except (USAGE, AssertionError) as error:
            problems.append(f"{command}: {error}")
    assert problems == []


def test_pages_have_commands() -> None:
    assert sum(len([*commands_of(page.read_text(encoding="utf-8"))]) for page in PAGES) > 200


@pytest.mark.parametrize(
    "command",
    [
        "lmt trian my.yaml",
        "lmt train my.yaml --dry-runs",
        "lmt train my.yaml trainer.num_steps=3",
        "lmt train my.yaml --model.layers 3",
        "lmt data at my.yaml --step many",
        "lmt export-hf my-run",
        "lmt plan my.yaml --devices",
    ],
)
def test_a_command_that_would_be_refused_is_noticed(command: str) -> None:
    with pytest.raises((USAGE, AssertionError)):
        check(command)


def test_commands_are_read_from_blocks_of_a_page() -> None:
    block = "lmt runs   # all\nA=1 .venv/bin/lmt train c.yaml \\\n    x=1 > log && lmt diff a b | head\npip x\n"
    page = f"```bash\n{block}```\nlmt no"
    assert [*commands_of(page)] == ["lmt runs", ".venv/bin/lmt train c.yaml      x=1", "lmt diff a b"]
