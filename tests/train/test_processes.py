"""Several processes that train one run: the bits of one process, and a resume by another number of them."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import lmt_command, lmt_environment
from tests.train.conftest import MakeConfig

pytestmark = pytest.mark.slow

STEPS = 12


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(config: Path, directory: Path, *, processes: int, devices: int, overrides: tuple[str, ...] = ()) -> None:
    directory.mkdir(exist_ok=True)
    port = free_port()
    running = []
    for index in range(processes):
        together = (
            f"trainer.distributed.coordinator_address=127.0.0.1:{port}",
            f"trainer.distributed.num_processes={processes}",
            f"trainer.distributed.process_id={index}",
        )
        command = lmt_command("train", config, *overrides, *(together if processes > 1 else ()))
        env = lmt_environment(devices=devices)
        with (directory / f"out.{index}").open("wb") as output:
            running.append(subprocess.Popen(command, cwd=directory, env=env, stdout=output, stderr=output))
    codes = [process.wait(timeout=600) for process in running]
    assert codes == [0] * processes, "\n".join((directory / f"out.{i}").read_text() for i in range(processes))


def numbers(directory: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (directory / "logs" / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "train/loss", "optim/grad_norm", "eval/loss", "params/norm/total")
    return [tuple(line[key] for key in keys if key in line) for line in lines]


def test_two_processes_are_one_run(make_config: MakeConfig, tmp_path: Path) -> None:
    watch = {"interval": 5, "include_per_parameter_norms": False, "watch_targets": ["params"]}
    config = make_config(
        trainer={
            "num_train_steps": STEPS,
            "steps_per_eval": 6,
            "watch": watch,
            "checkpointer": {"keep": [{"every": 4}]},
        }
    )
    train(config, tmp_path / "one", processes=1, devices=1)
    train(config, tmp_path / "two", processes=2, devices=1)
    reference = numbers(tmp_path / "one")
    assert len(reference) >= STEPS + 2
    assert numbers(tmp_path / "two") == reference
    assert (tmp_path / "two" / "out.1").read_bytes().count(b"step ") == 0, "only the first process speaks"

    for step in (8, 12):
        (tmp_path / "two" / "checkpoints" / "run" / str(step)).rename(tmp_path / f"gone.{step}")
    train(config, tmp_path / "two", processes=1, devices=2)
    assert "resumed at step 4" in (tmp_path / "two" / "out.0").read_text()
    assert numbers(tmp_path / "two") == reference
