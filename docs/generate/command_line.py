"""The command-line reference: the output of `lmt --help` and `lmt COMMAND --help` as Markdown."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

_EXAMPLES = re.compile(r"^(?:For example|Examples?):\s*$", re.MULTILINE)


def command_line() -> str:
    """Every command with its arguments, options and examples."""
    from typer.main import get_command

    from cli.main import app

    return "\n".join(_command("lmt", get_command(app)))


def _command(path: str, command: Any) -> Iterator[str]:
    depth = min(2 + path.count(" "), 4) - (path != "lmt")
    yield f'{"#" * depth} `{path}` {{ #{path.replace(" ", "-")} data-toc-label="{path.removeprefix("lmt ")}" }}'
    yield ""
    text, examples = _help(command)
    context = command.context_class(command, info_name=path)
    yield from (text, "", "```console", f"$ {path} {' '.join(command.collect_usage_pieces(context))}", "```", "")
    if examples:
        yield from ("For example:", "", "```bash", *examples, "```", "")
    parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [p for p in parameters if p.param_type_name == "option" and not p.name.endswith("_completion")]
    yield from _table("argument", arguments, context)
    yield from _table("option", options, context)
    if command.epilog:
        yield from (" ".join(command.epilog.split()), "")
    commands: dict[str, Any] = getattr(command, "commands", {})
    if commands:
        yield from ("| command | |", "|---|---|")
        for name, child in commands.items():
            yield f"| [`{path} {name}`](#{path.replace(' ', '-')}-{name}) | {_summary(child)} |"
        yield ""
    for name, child in commands.items():
        yield from _command(f"{path} {name}", child)


def _summary(command: Any) -> str:
    """The full first paragraph of a command's help."""
    return _cell(inspect.cleandoc(command.help or "").split("\n\n")[0])


def _help(command: Any) -> tuple[str, list[str]]:
    """The paragraphs of a command's help, and the lines of its examples."""
    text, *examples = _EXAMPLES.split(inspect.cleandoc(command.help or "").replace("\f", ""), maxsplit=1)
    return text.strip(), [line.strip() for line in "".join(examples).split("\n") if line.strip()]


def _table(title: str, parameters: list[Any], context: Any) -> Iterator[str]:
    records = [record for parameter in parameters if (record := parameter.get_help_record(context))]
    if records:
        yield from (f"| {title} | |", "|---|---|")
        for name, meaning in records:
            yield f"| `{_cell(name)}` | {_cell(meaning)} |"
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
