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

from cli.out_of_memory import explain_out_of_memory
from lm_trainer.core.errors import EXIT_OUT_OF_MEMORY, translate_out_of_memory
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import Lmt, RunLmt
from tests.run.conftest import write_config

ROWS = 1 << 19
"""Rows of a microbatch whose activations (514 GB at once) no machine holds."""


class JaxRuntimeError(RuntimeError):
    """As JAX calls its own."""


@pytest.mark.parametrize(
    ("message", "explanation"),
    [
        # GPU: the allocator, in a step and at the start; libraries; communicators.
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.\nBufferAssignment stats:",
         "Out of memory while trying to allocate 4770354232 bytes."),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 18.18GiB on device ordinal 0",
         "RESOURCE_EXHAUSTED: Failed to allocate request for 18.18GiB on device ordinal 0"),
        ("INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
         "OUT_OF_MEMORY: out of memory"),
        ("INTERNAL: the library was not initialized: CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED"),
        # TPU: the compiler, in two versions; the loading of a program; an array.
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.95G of "
         "15.48G hbm.\n Exceeded hbm capacity by 6.47G.\n\nTotal hbm usage >= 22.47G:",
         "Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm."),
        ("RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available "
         "bytes: 95.74G",
         "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available "
         "bytes: 95.74G"),
        ("RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.49G at the bottom of memory. "
         "That was not possible. There are 147.64M free, 0B reserved, and 147.64M reservable.",
         "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.49G at the bottom of memory. "
         "That was not possible. There are 147.64M free, 0B reserved, and 147.64M reservable."),
        # A CPU, at what waits for the step.
        ("INTERNAL: Error dispatching computation: Out of memory allocating 314524041216 bytes.",
         "Out of memory allocating 314524041216 bytes."),
    ],
)  # fmt: skip
def test_each_backend_is_understood(message: str, explanation: str) -> None:
    assert (
        str(translate_out_of_memory(JaxRuntimeError(message))) == f"the memory of a device is too small: {explanation}"
    )


def test_an_array_that_no_device_holds_is_understood_as_well() -> None:
    message = (
        "Error allocating device buffer: Attempting to allocate 8.00M. That was not possible. There are 6.43M free."
    )
    assert "Attempting to allocate 8.00M" in str(translate_out_of_memory(ValueError(f"RESOURCE_EXHAUSTED: {message}")))
    assert translate_out_of_memory(ValueError(message)) is None


@pytest.mark.parametrize(
    "message",
    [
        "INTERNAL: a kernel failed",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 17M of 16M",
        "RESOURCE_EXHAUSTED: Allocation (size=134217728) would exceed memory (size=67108864) :: [space=vmem]",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 73728, available: 65536",
        "RESOURCE_EXHAUSTED: SERVER: Received message larger than max (8388639 vs. 4194304)",
    ],
)
def test_what_no_smaller_run_would_mend_is_none_of_memory(message: str) -> None:
    assert translate_out_of_memory(JaxRuntimeError(message)) is None


def test_other_errors_are_none_of_memory() -> None:
    assert translate_out_of_memory(RuntimeError("out of memory of what happened")) is None
    assert "Unable to allocate 2 TiB" in str(translate_out_of_memory(MemoryError("Unable to allocate 2 TiB")))


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
        assert [reference() for reference in held] == [None]
        return subprocess.CompletedProcess([], 1, "", "no plan")

    monkeypatch.setattr(subprocess, "run", plan)
    with pytest.raises(typer.Exit) as ended, explain_out_of_memory(RunConfig(), Path("run.yaml"), []):
        train()
    assert ended.value.exit_code == EXIT_OUT_OF_MEMORY


@pytest.mark.slow
def test_a_run_that_grows_too_large_says_what_fits_and_goes_on_from_its_checkpoint(
    run_lmt: RunLmt, lmt: Lmt, tmp_path: Path, text_files: tuple[Path, Path]
) -> None:
    trainer = {"num_train_steps": 2, "max_devices": 1}
    write_config(tmp_path / "run.yaml", text_files, {"trainer": trainer, "model": {"seq_len": 64}})
    begun = lmt("train", "run.yaml")
    assert begun.returncode == 0, begun.stderr
    larger = (f"trainer.train_batch_size={ROWS}", f"trainer.per_device_parallelism={ROWS}")
    done = run_lmt("train", "run.yaml", *larger, "trainer.num_train_steps=4", "--allow-config-change")
    assert done.returncode == EXIT_OUT_OF_MEMORY, done.stderr
    assert "resumed at step 2" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"error: the memory of a device is too small: .* \d+ bytes", done.stderr), done.stderr
    assert "DOES NOT FIT" in done.stdout
    advised = re.search(r"trainer\.per_device_parallelism=(\d+)", done.stdout.partition("largest microbatch")[2])
    assert advised is not None, done.stdout
    assert 0 < int(advised[1]) < ROWS
    assert "lmt plan run.yaml" in done.stdout
    assert "--devices 1xcpu --memory" in done.stdout
    resumed = lmt("train", "run.yaml", "trainer.num_train_steps=4", "--allow-config-change")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 2" in resumed.stdout + resumed.stderr
