"""Processes of a run that are lost or slow: the run goes on with those that are left, and names the slow one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.conftest import MakeConfig
from tests.run.test_processes import find_process, read_numbers, start_launcher, train_alone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc"),
]


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_the_launcher_goes_on_with_the_processes_that_are_left(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        trainer={
            # So many that the run goes on for long after the process was found.
            "num_train_steps": 240,
            "steps_per_eval": 120,
            "checkpointer": {"save_interval": "1h", "keep": [{"every": 20}]},
        }
    )
    train_alone(config, tmp_path / "one", devices=1)
    two = tmp_path / "two"
    two.mkdir()
    with (two / "out").open("w+b") as output:
        launcher = start_launcher(config, two, output, "--restarts", "1")
        while num_lines(two / "logs" / "run" / "metrics.jsonl") < 50:
            assert launcher.poll() is None, (two / "out").read_text()
            time.sleep(0.001)
        os.kill(find_process(launcher, 1), signal.SIGKILL)
        assert launcher.wait(timeout=180) == 0, (two / "out").read_text()
    printed = (two / "out").read_text()
    assert re.search(r"^process 1 of 2 \(pid \d+\) was killed by SIGKILL$", printed, re.MULTILINE), printed
    _, after = printed.split("starting again with the 1 of 2 processes that are left\n")
    resumed = re.search(r"^\[0\] resumed at step (\d+) of 240$", after, re.MULTILINE)
    assert resumed, after
    assert int(resumed[1]) in range(20, 240, 20)
    assert read_numbers(two) == read_numbers(tmp_path / "one")


def test_a_process_that_pauses_again_and_again_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    alerts = {"straggler": {"steps": 10}, "quiet_steps": 10}
    # Most of a step is a process's own part, so that most pauses are in it, also where other work makes a step long.
    steps = {"train_batch_size": 512, "num_train_steps": 100_000, "steps_per_eval": 100_000}
    config = make_config(trainer={**steps, "alerts": alerts})
    named = re.compile(r"alert: step \d+: process 1 of 2 \(.+, pid (\d+)\) makes the others wait for ")
    metrics = tmp_path / "logs" / "run" / "metrics.jsonl"
    with (tmp_path / "out").open("w+b") as output:
        launcher = start_launcher(config, tmp_path, output)
        while num_lines(metrics) < 12:
            assert launcher.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        slow, end = find_process(launcher, 1), time.monotonic() + 240
        # On a busy machine, the other process may be named first.
        while not (found := named.search((tmp_path / "out").read_text())) and time.monotonic() < end:
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.02)
        launcher.terminate()
        assert launcher.wait(timeout=120) == 75
    assert found, (tmp_path / "out").read_text()
    assert found[1] == str(slow)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {line["alert"] for line in lines if "alert" in line} == {"straggler"}
    assert any(line.get("throughput/slowest_process") == 1 for line in lines)


def wait_for_copy(memory: Path, step: int, alive: subprocess.Popen[bytes]) -> None:
    """Waits until both processes have written a copy of a step, or of a later one."""
    while True:
        written = [file.parent.name for file in memory.glob("*/*/*/*.json")]
        if any(written.count(name) == 2 and int(name.split("-")[0]) >= step for name in written):
            return
        assert alive.poll() is None
        time.sleep(0.001)


def test_a_run_goes_on_from_the_memory_of_the_machine_that_is_left(make_config: MakeConfig, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    config = make_config(
        trainer={
            "num_train_steps": 120,
            "steps_per_eval": 1000,
            "max_eval_batches": 1,
            "checkpointer": {
                "save_interval": "1h",
                "keep": [{"every": 20, "until": 20}, {"every": 1000}],
                "memory": {"every": 5, "directory": str(memory)},
            },
        }
    )
    train_alone(config, tmp_path / "one", devices=1)
    two = tmp_path / "two"
    two.mkdir()
    with (two / "out").open("w+b") as output:
        launcher = start_launcher(config, two, output)
        wait_for_copy(memory, 40, launcher)
        os.kill(find_process(launcher, 1), signal.SIGKILL)
        assert launcher.wait(timeout=180) == 137, (two / "out").read_text()
    # Its machine is lost as well.
    lost = [file for file in memory.glob("*/*/*/*") if file.stem == "1"]
    assert lost
    for file in lost:
        file.unlink()
    printed = train_alone(config, two, devices=1)
    resumed = re.search(r"resumed at step (\d+) of 120", printed)
    assert resumed, printed
    assert int(resumed[1]) in range(40, 120, 5)
    assert read_numbers(two) == read_numbers(tmp_path / "one")
    assert not list(memory.glob("*/*"))
