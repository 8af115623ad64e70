"""XLA's threads on a CPU: what their number decides, and that a run keeps it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.core.runtime import available_cores
from tests.conftest import ROOT, RunLmt
from tests.run import eigenvectors
from tests.run.conftest import MakeConfig

# So large that XLA cuts the sums of the gradient of a bias into other parts for 4 threads than for 2.
MODEL = {"seq_len": 128, "hidden_dim": 128, "num_layers": 1, "scan_layers": False}
TRAINER = {"train_batch_size": 32, "num_train_steps": 4, "checkpointer": {"keep": [{"every": 2}]}}


@pytest.mark.parametrize("arguments", [(), ("loaded",)])
def test_eigenvectors_do_not_depend_on_the_blas_threads_of_the_environment(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.run.eigenvectors", *arguments]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert result.stdout.strip() == eigenvectors.digest()


@pytest.mark.optimised
@pytest.mark.slow
def test_a_run_keeps_the_threads_that_it_was_begun_with(
    make_config: MakeConfig, tmp_path: Path, run_lmt: RunLmt
) -> None:
    config = make_config(model=MODEL, trainer=TRAINER)

    def train(name: str, *overrides: str, devices: int = 1) -> tuple[str, dict[str, Any]]:
        result = run_lmt("train", config, f"trainer.id={name}", *overrides, devices=devices)
        assert result.returncode == 0, result.stderr
        assert "bits may differ" not in result.stdout + result.stderr
        log = tmp_path / "logs" / name
        lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
        last = [line["fingerprint"] for line in lines if line["step"] == 4 and "fingerprint" in line][-1]
        return last, json.loads((log / "env.json").read_text())[-1]

    four, attempt = train("four", devices=4)
    assert attempt["cpu_threads"] == max(4, available_cores())
    shutil.rmtree(tmp_path / "checkpoints" / "four" / "4")
    resumed, attempt = train("four")
    assert (resumed, attempt["step"], attempt["cpu_threads"]) == (four, 2, max(4, available_cores()))
    # From a checkpoint: to look at it starts the backends of jax, for which it is too late to say anything then.
    replayed = run_lmt("replay", "four", "--step", "4", "--json", "trainer.jax_config.jax_num_cpu_devices=2")
    assert replayed.returncode == 0, replayed.stderr
    replay = json.loads(replayed.stdout)
    assert replay["start"] == 2
    for name in ("train/loss", "optim/grad_norm"):
        assert replay["now"][name] == replay["recorded"][name]
    one, attempt = train("one", f"trainer.cpu_threads={max(4, available_cores())}")
    assert (one, attempt["cpu_threads"]) == (four, max(4, available_cores()))
