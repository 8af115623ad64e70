"""Pages as a browser shows them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")


def render(page: str, directory: Path, *flags: str) -> str:
    """Returns the document after its scripts have run.

    Args:
        page: the text of the page.
        directory: an empty directory for the page and the files of the browser.
        flags: further flags of chromium.
    """
    file = directory / "page.html"
    file.write_text(page)
    command = ["chromium", *_FLAGS, *flags, f"--user-data-dir={directory}/user", "--dump-dom", f"file://{file}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
