"""Table of the tests and the lines of code of each model family: `python -m docs.generate.family_checks` prints it."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path


def family_checks() -> str:
    """A row for every family: for each check, the tests that include it; and the file of the family with its lines."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    from lm_trainer.models import MODEL_CONFIGS
    from tests.models.family_checks import CHECKS, list_family_checks

    checks = list_family_checks()
    yield f"| family | {' | '.join(CHECKS)} | file, lines |"
    yield "|---" * (len(CHECKS) + 2) + "|"
    for config in MODEL_CONFIGS:
        name, path = config.model_fields["type"].default, Path(inspect.getfile(config))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        cells = [checks[name].get(check, "no") for check in CHECKS]
        yield f"| `{name}` | {' | '.join(cells)} | `{path.name}`, {lines} |"


if __name__ == "__main__":
    sys.stdout.write(f"{family_checks()}\n")
