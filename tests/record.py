"""The record of a passed run of `.ci/run`, as JSON: `python -m tests.record COMMIT DIRECTORY` prints it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

CLOSING = re.compile(r"^(?:=+ )?((?:\d+ \w+, )*\d+ \w+)(?:, \d+ warnings?)? in [\d.]+s", re.MULTILINE)
"""pytest's last line: `4365 passed, 1 skipped in 1025.45s`."""


def counts(log: str) -> dict[str, int]:
    """Returns the tests of a stage by outcome, from all that it printed."""
    closing_lines = CLOSING.findall(log)
    pairs = re.findall(r"(\d+) (\w+)", closing_lines[-1]) if closing_lines else []
    return {outcome: int(count) for count, outcome in pairs if not outcome.startswith("warning")}


def record(commit: str, directory: Path, everything: bool) -> dict[str, object]:
    """Returns what is known of a run from its directory, which holds `seconds` and a log of each stage."""
    seconds = dict(line.split() for line in (directory / "seconds").read_text().splitlines())
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "all": everything,
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "cores": os.cpu_count(),
        "stages": {
            stage: {"seconds": int(elapsed), **counts((directory / f"{stage}.log").read_text(errors="replace"))}
            for stage, elapsed in seconds.items()
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    print(json.dumps(record(options.commit, options.directory, options.all), indent=2))
