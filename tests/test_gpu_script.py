"""`python -m benchmarks.gpu`, which runs where a card is lent: on small shapes, so that it works on the day."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import ROOT, make_parts
from lm_trainer.config.loader import load
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import lmt_environment

WORKLOADS = sorted((ROOT / "benchmarks/workloads").glob("*.yaml"))


@pytest.mark.parametrize("file", WORKLOADS, ids=lambda file: file.stem)
def test_workloads_are_configurations(file: Path) -> None:
    assert load(file, (), RunConfig).config.trainer.mp.compute == "bfloat16"


def test_all_parts_together_take_no_more_than_the_time_that_is_said() -> None:
    assert sum(part.minutes for part in make_parts(False, Path())) <= 25


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", *options]
    return subprocess.run(command, cwd=ROOT, env=lmt_environment(), capture_output=True, text=True, check=False)


def test_a_part_that_does_not_exist() -> None:
    done = run("--only", "mfus")
    assert done.returncode == 1
    assert "--only mfus: there are mfu, peers_gpt2, peers_llama" in done.stderr


@pytest.mark.slow
def test_a_part_is_run_and_kept(tmp_path: Path) -> None:
    done = run("--only", "determinism", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal, bit for bit" in (tmp_path / "determinism.txt").read_text()
