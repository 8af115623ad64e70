"""Handle with which the driver controls a worker process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from lm_trainer.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


class MissingPackage(Exception):
    """A package that a kind needs is not installed. The argument is the name of the package."""


class Steps(NamedTuple):
    """Measurements that a worker returns for a number of steps: some per step, and some for all steps together."""

    wall: list[float]
    """Wall time of each step in seconds."""
    cpu: list[float]
    """CPU seconds of all threads of the worker's process in each step."""
    loss: list[float]
    idle: float
    """CPU seconds that the worker used since its last answer, while others worked."""
    peak: int
    """Peak resident memory so far, in bytes."""


class Worker:
    """Process of one kind. It has exclusive use of the device between a request and its answer.

    Raises:
        Missing: if a package is not installed.
        UserError: if the process fails; contains the end of its output.
    """

    def __init__(self, name: str, shape: str, weights: Path):
        self.name, self._log = name, weights.with_name(f"{name}.log")
        command = [sys.executable, "-m", "benchmarks.peers.worker", name, shape, str(weights)]
        with self._log.open("w") as log:
            # In a new session, so that a keyboard interrupt ends only the driver, which then ends its workers.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=worker_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            ready = self._answer()
            if "missing" in ready:
                raise MissingPackage(ready["missing"])
        except BaseException:
            self._end()
            raise
        self.device: str = ready["device"]
        self.facts: Mapping[str, float] = ready["facts"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, count: int) -> Steps:
        """Trains a number of steps, and returns when they are finished."""
        return Steps(**self._ask(f"run {count}"))

    def weights_norm(self) -> float:
        """Returns the norm of the weights. Also resets the peak memory, to exclude compilation."""
        return self._ask("settle")["norm"]

    def _ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(question, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._make_error() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._make_error()
        return json.loads(line)

    def _make_error(self) -> UserError:
        code = self._process.wait()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return UserError(f"the process of {self.name!r} ended with exit code {code}:\n{end}")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def worker_environment() -> dict[str, str]:
    """Returns an environment in which idle workers leave the device unused. Keeps variables that are already set."""
    quiet = {
        # By default, OpenMP threads spin while they wait for each other, which takes cores from the active process.
        "OMP_WAIT_POLICY": "passive",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**quiet, **os.environ}
