"""A worker, seen from the driver."""

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


class Missing(Exception):
    """A package that a kind needs is not installed; its argument is the name."""


class Steps(NamedTuple):
    """The answer of a worker about some steps: one number for each of them, and what holds for all."""

    wall: list[float]
    """Seconds by the clock."""
    cpu: list[float]
    """Seconds of all threads of its process."""
    loss: list[float]
    idle: float
    """CPU seconds that it used since its last answer, while others worked."""
    peak: int
    """The largest resident memory so far, in bytes."""


class Worker:
    """The process of one kind. It has the device for itself between a question and the answer.

    Raises:
        Missing: when a package is not installed.
        UserError: when the process fails, with the end of what it said.
    """

    def __init__(self, name: str, shape: str, weights: Path):
        self.name, self._log = name, weights.with_name(f"{name}.log")
        command = [sys.executable, "-m", "benchmarks.peers.worker", name, shape, str(weights)]
        with self._log.open("w") as log:
            # A session of its own: an interrupt from the keyboard ends the driver, and the driver its workers.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            ready = self._answer()
            if "missing" in ready:
                raise Missing(ready["missing"])
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
        """Trains so many steps, and returns when they are done."""
        return Steps(**self._ask(f"run {count}"))

    def settle(self) -> float:
        """The norm of the weights; memory that was used so far is forgotten, since compilation is no part of a step."""
        return self._ask("settle")["norm"]

    def _ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(question, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> UserError:
        code = self._process.wait()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return UserError(f"the process of {self.name!r} ended with exit code {code}:\n{end}")

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def environment() -> dict[str, str]:
    """For workers: what keeps idle ones from taking the device from the one that works; set variables are kept."""
    quiet = {
        # By default threads of OpenMP spin where they wait for one another, and take the core of whoever has it.
        "OMP_WAIT_POLICY": "passive",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**quiet, **os.environ}
