"""`python -m lm_trainer`, and the console script `lmt`: opens the command line.

In the repository that is the package `cli`. An installed `lm_trainer` carries it as `lm_trainer/_cli`, so that nothing
of that name stands in anybody's site-packages; it takes the name in this process alone.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path

_NEW_OBJECTS = 50_000
"""Number of new objects at which Python's garbage collector looks for cycles; Python's default is 700 or 2,000."""


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    # Imports create a million objects that stay until the end. With Python's default the collector walks through them
    # again and again, which takes a tenth of the CPU time of `lmt train --dry-run`.
    gc.set_threshold(_NEW_OBJECTS)
    package_dir = Path(__file__).resolve().parent
    candidates = (package_dir / "_cli", package_dir.parent / "cli")
    directory = next(path for path in candidates if path.is_dir())
    spec = importlib.util.spec_from_file_location(
        "cli", directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["cli"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    importlib.import_module("cli.main").main()


if __name__ == "__main__":
    main()
