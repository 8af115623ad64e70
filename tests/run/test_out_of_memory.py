"""A run whose memory is too small: an exit code of its own, the plan of the run, and settings that fit."""

from __future__ import annotations

import re
import subprocess
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from cli.out_of_memory import explained_out_of_memory
from lm_trainer.core.errors import EXIT_OUT_OF_MEMORY, out_of_memory
from lm_trainer.run.config import RunConfig
from tests.conftest import RunLmt
from tests.run.conftest import write_config

ROWS = 1 << 21
"""Rows of a microbatch whose activations no machine holds."""


class JaxRuntimeError(RuntimeError):
    """As JAX calls its own."""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        # A GPU's allocator, in a step.
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nBufferAssignment: ...",
         "Out of memory while trying to allocate 17179869184 bytes."),
        # The compiler for TPUs.
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20G of 15G",
         "Ran out of memory in memory space hbm. Used 20G of 15G"),
        # A CPU, at what waits for the step.
        ("INTERNAL: Error dispatching computation: Out of memory allocating 314524041216 bytes.",
         "Out of memory allocating 314524041216 bytes."),
        ("RESOURCE_EXHAUSTED: no more of it", "RESOURCE_EXHAUSTED: no more of it"),
    ],
)  # fmt: skip
def test_each_backend_is_understood(said: str, told: str) -> None:
    assert str(out_of_memory(JaxRuntimeError(said))) == f"the memory of a device is too small: {told}"


def test_other_errors_are_none_of_memory() -> None:
    assert out_of_memory(JaxRuntimeError("INTERNAL: a kernel failed")) is None
    assert out_of_memory(RuntimeError("out of memory of what happened")) is None
    assert "Unable to allocate 2 TiB" in str(out_of_memory(MemoryError("Unable to allocate 2 TiB")))


def test_the_state_of_the_run_is_freed_before_its_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[weakref.ref[Any]]()

    def train() -> None:
        state = np.zeros(9)
        held.append(weakref.ref(state))
        try:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: no more of it")
        except JaxRuntimeError as error:
            raise MemoryError("a step failed") from error

    def plan(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        assert [each() for each in held] == [None]
        return subprocess.CompletedProcess([], 1, "", "no plan")

    monkeypatch.setattr(subprocess, "run", plan)
    with pytest.raises(typer.Exit) as ended, explained_out_of_memory(RunConfig(), Path("run.yaml"), []):
        train()
    assert ended.value.exit_code == EXIT_OUT_OF_MEMORY


@pytest.mark.slow
def test_a_run_that_is_too_large_says_what_fits(run_lmt: RunLmt, tmp_path: Path, text_files: tuple[Path, Path]) -> None:
    trainer = {"num_train_steps": 2, "train_batch_size": ROWS, "per_device_parallelism": ROWS}
    write_config(tmp_path / "run.yaml", text_files, {"trainer": trainer, "model": {"seq_len": 64}})
    done = run_lmt("train", "run.yaml")
    assert done.returncode == EXIT_OUT_OF_MEMORY, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"error: the memory of a device is too small: .* \d+ bytes", done.stderr), done.stderr
    assert "DOES NOT FIT" in done.stdout
    advised = re.search(r"trainer\.per_device_parallelism=(\d+)", done.stdout.partition("largest microbatch")[2])
    assert advised is not None, done.stdout
    assert 0 < int(advised[1]) < ROWS
    assert "lmt plan run.yaml --devices 1xcpu --memory" in done.stdout
