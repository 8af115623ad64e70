"""Computes a recorded step with the code of a checkout, for `git bisect run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError

GOOD, BAD, SKIP, STOP = 0, 1, 125, 128
"""Exit codes for `git bisect run`: the commit is good, bad, or cannot be tested; or the bisection must stop."""
_WORKER = Path(__file__).with_name("bisect_worker.py")


@dataclass(frozen=True)
class CodeVerdict:
    """The result for one version of the code."""

    step: int
    exit_code: int
    """`GOOD`, `BAD` or `SKIP`."""
    sentence: str
    difference: dict[str, Any] | None = None
    """First difference: `step`, `what`, `recorded` and `now`."""

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        return asdict(self)


def check_code(code: Path, run: Path, step: int, overrides: Sequence[str]) -> CodeVerdict:
    """Computes a step of a run with the code in a directory, in another process.

    Args:
        code: a checkout, which contains the package `lm_trainer`.
        run: the run directory.
        step: the step, counted from 1.
        overrides: settings that do not affect the results.

    Raises:
        UserError: if there is no such package.
    """
    if not (code / "lm_trainer").is_dir():
        raise UserError(f"--code {code}: there is no package lm_trainer in this directory; give the root of a checkout")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")])}
    # With -P, the directory of the worker is not searched for modules, so only the checkout is.
    command = [sys.executable, "-P", str(_WORKER), str(run), str(step), *overrides]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
        difference, error = result["difference"], result["error"]
    except (IndexError, ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        difference, error = None, lines[-1]
    if error is not None:
        return CodeVerdict(step, SKIP, f"step {step} cannot be computed with this code: {error}")
    if difference is None:
        return CodeVerdict(step, GOOD, f"step {step} has the recorded bits with this code")
    sentence = (
        f"step {difference['step']} has other bits with this code: {difference['what']} was "
        f"{difference['recorded']!r}, now {difference['now']!r}"
    )
    return CodeVerdict(step, BAD, sentence, difference)
