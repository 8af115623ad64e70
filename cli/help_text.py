"""Reflows help texts so that their paragraphs fill the width of the terminal."""

from __future__ import annotations

import re
from typing import Any


def reflow_group(group: Any) -> None:
    """Joins the lines of every paragraph in the help texts of a group's commands and nested groups."""
    for command in group.commands.values():
        command.help = reflow(command.help) if command.help else command.help
        if hasattr(command, "commands"):
            reflow_group(command)


def reflow(text: str) -> str:
    """Joins the lines of each paragraph. Indented lines are examples, and stay unchanged.

    A line that introduces examples becomes a separate paragraph.
    """
    text = re.sub(r"^((?:For example|Examples?):)\n(?=\s)", r"\1\n\n", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(part if re.match(r"\s|[-*] ", part) else " ".join(part.split()) for part in paragraphs)
