"""Files of the repository as pages of the site."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def file_of_repository(name: str) -> str:
    """The text of a Markdown file below its title, with links into `docs/` as links between pages.

    Links to other files lose their address, because the site has no copy of them.
    """
    text = (ROOT / name).read_text(encoding="utf-8").split("\n", 1)[1]
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^]]+)\]\((?![a-z/-]+\.md|https?:|#)[^)]+\)", r"\1", text)


def output(name: str) -> str:
    """The output of a command, as `docs.generate.pictures` got it when it ran it."""
    text = (ROOT / "docs/pictures" / f"{name}.txt").read_text(encoding="utf-8")
    return f"```text\n{text}```"
