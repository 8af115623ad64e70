"""A run that is killed at any moment and started again writes what a run that was never killed writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import lmt_command, lmt_environment
from tests.train.conftest import MakeConfig

pytestmark = pytest.mark.slow

STEPS = 240
Moment = Callable[[Path, Path], bool]


def metric_lines(run: Path) -> int:
    file = run / "logs" / "run" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def checkpoint_entries(run: Path) -> list[str]:
    directory = run / "checkpoints" / "run"
    return os.listdir(directory) if directory.exists() else []


def compiling(run: Path, output: Path) -> bool:
    return b"compiling the training step" in output.read_bytes()


def saving(run: Path, output: Path) -> bool:
    return any("orbax-checkpoint-tmp" in name for name in checkpoint_entries(run))


def deleting(run: Path, output: Path) -> bool:
    return any(name.startswith(".trash") for name in checkpoint_entries(run))


def after_steps(count: int) -> Moment:
    """Once so many more lines of metrics are there than at the first look."""
    start: list[int] = []

    def reached(run: Path, output: Path) -> bool:
        if not compiling(run, output):
            return False
        start[:] = start or [metric_lines(run)]
        return metric_lines(run) >= start[0] + count

    return reached


def start(config: Path, run: Path, devices: int) -> tuple[subprocess.Popen[bytes], Path]:
    run.mkdir(exist_ok=True)
    output = run / f"output-{time.monotonic_ns()}.txt"
    environment = lmt_environment(devices=devices)
    with output.open("wb") as stream:
        process = subprocess.Popen(
            lmt_command("train", config), cwd=run, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    return process, output


def stop_at(config: Path, run: Path, moment: Moment, number: signal.Signals, devices: int = 1) -> int:
    """Starts the run and sends it a signal at a moment; returns how it ended."""
    process, output = start(config, run, devices)
    while process.poll() is None and not moment(run, output):
        time.sleep(0.0002)
    assert process.poll() is None, f"the run ended before the moment came:\n{output.read_text()}"
    process.send_signal(number)
    return process.wait(timeout=120)


def finish(config: Path, run: Path, devices: int = 1) -> str:
    process, output = start(config, run, devices)
    code = process.wait(timeout=600)
    assert code == 0, output.read_text()
    return output.read_text()


def series(run: Path) -> list[tuple[int, str, str]]:
    """Every loss as the text that stands in the file."""
    rows = [
        json.loads(line, parse_float=str) for line in (run / "logs" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        (r["step"], key, r[key]) for r in rows for key in ("train/loss", "optim/grad_norm", "eval/loss") if key in r
    ]


@pytest.fixture
def config(make_config: MakeConfig) -> Path:
    return make_config(
        model={"hidden_dim": 64},
        trainer={
            "num_train_steps": STEPS,
            "steps_per_eval": 60,
            "checkpointer": {"save_interval": "250ms", "keep": [{"every": 100}]},
        },
    )


def test_five_kills_and_a_change_of_devices(config: Path, tmp_path: Path) -> None:
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    finish(config, reference)
    expected = series(reference)
    assert [step for step, key, _ in expected if key == "train/loss"] == list(range(1, STEPS + 1))
    assert [step for step, key, _ in expected if key == "eval/loss"] == [60, 120, 180, 240]

    codes = [
        stop_at(config, killed, compiling, signal.SIGKILL),
        stop_at(config, killed, after_steps(20), signal.SIGKILL),
        stop_at(config, killed, saving, signal.SIGKILL),
        stop_at(config, killed, deleting, signal.SIGKILL),
        stop_at(config, killed, after_steps(10), signal.SIGTERM),
        stop_at(config, killed, after_steps(5), signal.SIGINT, devices=2),
    ]
    assert codes == [-9, -9, -9, -9, 75, 75]
    output = finish(config, killed, devices=4)
    assert "resumed at step" in output
    assert series(killed) == expected
    assert {"100", "200", str(STEPS)} <= set(checkpoint_entries(killed))


def test_a_complete_run_is_left_as_it_is(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "complete"
    finish(config, run)
    before = series(run)
    assert f"run run was complete already, after step {STEPS}" in finish(config, run)
    assert series(run) == before
