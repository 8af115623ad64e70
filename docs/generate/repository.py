"""Files of the repository as pages of the site."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def file_of_repository(name: str) -> str:
    """The text of a Markdown file below its title, with links into `docs/` as links between pages.

    Links to other files become plain text, because the site has no copy of these files.
    """
    text = (ROOT / name).read_text(encoding="utf-8").split("\n", 1)[1]
    # Links are relative to the page that includes the file.
    page = next(path for path in DOCS.rglob("*.md") if f"<!-- generated: file: {name} -->" in path.read_text("utf-8"))
    to_docs = f"{os.path.relpath(DOCS, page.parent)}/".removeprefix("./")
    text = re.sub(r"\]\(docs/", f"]({to_docs}", text)
    return re.sub(r"\[([^]]+)\]\((?!(?:\.\./)*[a-z/-]+\.md|https?:|#)[^)]+\)", r"\1", text)


def output(name: str) -> str:
    """The output of a command, recorded by `docs.generate.pictures`."""
    text = (DOCS / "pictures" / f"{name}.txt").read_text(encoding="utf-8")
    return f"```text\n{text}```"


def table_rows(path: Path) -> list[list[str]]:
    """Returns the cells of all rows of the tables in a Markdown file, headings included."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("| ") and "| ---" not in line]
