"""Results in a JSON file, with which an interrupted benchmark continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Settings = Mapping[str, str | int]


def read_results(path: Path | None, settings: Settings) -> dict[str, Any]:
    """Returns the results of an earlier command with the same settings, {} if there is none."""
    if path is None or not path.exists():
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    return saved["results"] if saved["settings"] == settings else {}


def write_results(path: Path | None, settings: Settings, results: Mapping[str, Any]) -> None:
    """Writes results, and the settings they belong to, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"settings": settings, "results": results}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
