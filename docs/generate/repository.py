"""Files of the repository as pages of the site."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def file_of_repository(name: str) -> str:
    """The text of a Markdown file below its title, with links into `docs/` as links between pages.

    Links to other files lose their address, because the site has no copy of them.
    """
    text = (ROOT / name).read_text(encoding="utf-8").split("\n", 1)[1]
    # Links count from the page that asks for the file.
    page = next(path for path in DOCS.rglob("*.md") if f"<!-- generated: file: {name} -->" in path.read_text("utf-8"))
    to_docs = f"{os.path.relpath(DOCS, page.parent)}/".removeprefix("./")
    text = re.sub(r"\]\(docs/", f"]({to_docs}", text)
    return re.sub(r"\[([^]]+)\]\((?!(?:\.\./)*[a-z/-]+\.md|https?:|#)[^)]+\)", r"\1", text)


def output(name: str) -> str:
    """The output of a command, as `docs.generate.pictures` got it when it ran it."""
    text = (DOCS / "pictures" / f"{name}.txt").read_text(encoding="utf-8")
    return f"```text\n{text}```"
