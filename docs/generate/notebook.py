"""The notebook of the tutorial: `python -m docs.generate.notebook` runs it, and writes it with its outputs.

Its page on the site is made from the recorded notebook. A test runs the cells.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.generate.repository import DOCS, ROOT

FILE = DOCS / "tutorial/notebook.ipynb"
_OUTPUT_LINES = 40
"""Number of lines of an output that the page shows."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.*\r(?!\n)")
"""Colours, and text that a progress bar has overwritten."""


def run_notebook(path: Path, directory: Path, env: Mapping[str, str] = os.environ) -> Any:
    """Runs the cells of a notebook in a directory, with the packages of this process and `lmt` on the path.

    Returns:
        The notebook with its outputs, as `nbformat` represents it.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(directory)}})
    with tempfile.TemporaryDirectory() as programs:
        lmt = Path(programs) / "lmt"
        lmt.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lm_trainer "$@"\n', encoding="utf-8")
        lmt.chmod(0o755)
        packages = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        path_of_programs = f"{programs}{os.pathsep}{env.get('PATH', os.defpath)}"
        return client.execute(env={**env, "PYTHONPATH": packages, "PATH": path_of_programs, "LMT_PROGRESS": "plain"})


def without_traces(notebook: Any, directory: Path) -> dict[str, Any]:
    """Returns a notebook as plain JSON, without times and warnings, and without paths of the machine in its outputs."""
    plain = json.loads(json.dumps(notebook))
    plain["metadata"] = {"kernelspec": plain["metadata"]["kernelspec"], "language_info": {"name": "python"}}
    for cell in plain["cells"]:
        cell["metadata"] = {}
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
    text = json.dumps(plain, ensure_ascii=False)
    for path in sorted({str(directory), str(directory.resolve()), str(ROOT)}, key=len, reverse=True):
        text = text.replace(f"{path}/", "").replace(path, ".")
    return json.loads(text)


def notebook_page() -> str:
    """Returns the recorded notebook as Markdown, below its title."""
    notebook = json.loads(FILE.read_text(encoding="utf-8"))
    parts = [part for cell in notebook["cells"] for part in _cell_parts(cell)]
    return "\n\n".join(parts).partition("\n")[2].strip()


def _cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    stream = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    if stream.strip():
        yield _text_block(stream)
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            # Blank lines would end the HTML block of Markdown.
            html_output = re.sub("\n+", "&#10;", "".join(data["text/html"]))
            yield f'<div class="output">{html_output}</div>'
        elif "text/plain" in data:
            yield _text_block("".join(data["text/plain"]))


def _text_block(text: str) -> str:
    lines = [_CONTROL.sub("", line).rstrip() for line in text.strip("\n").split("\n")]
    shown = [*lines[:_OUTPUT_LINES], *(["..."] if len(lines) > _OUTPUT_LINES else [])]
    return "\n".join(["```text", *shown, "```"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plain = without_traces(run_notebook(FILE, directory), directory)
    FILE.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
