"""Several processes that train one run: the bits of one process, and a resume by another number of them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from tests.conftest import StartLmt, lmt_command, lmt_environment
from tests.run.conftest import MakeConfig

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
STEPS = 12


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


Train = Callable[..., None]


@pytest.fixture
def train(start_lmt: StartLmt) -> Train:
    """`train(config, directory, processes=1, devices=1, overrides=())`: a run of several processes, to its end."""

    def run(config: Path, directory: Path, *, processes: int, devices: int, overrides: tuple[str, ...] = ()) -> None:
        directory.mkdir(exist_ok=True)
        port = free_port()
        running = []
        for index in range(processes):
            together = (
                f"trainer.distributed.coordinator_address=127.0.0.1:{port}",
                f"trainer.distributed.num_processes={processes}",
                f"trainer.distributed.process_id={index}",
            )
            settings, output = (*overrides, *(together if processes > 1 else ())), directory / f"out.{index}"
            running.append(start_lmt("train", config, *settings, cwd=directory, devices=devices, output=output))
        codes = [process.wait(timeout=600) for process in running]
        assert codes == [0] * processes, "\n".join((directory / f"out.{i}").read_text() for i in range(processes))

    return run


def numbers(directory: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (directory / "logs" / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "train/loss", "optim/grad_norm", "eval/loss", "params/norm/total")
    return [tuple(line[key] for key in keys if key in line) for line in lines]


@SLOW
@pytest.mark.optimised
def test_two_processes_are_one_run(make_config: MakeConfig, train: Train, tmp_path: Path) -> None:
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


def start_launcher(config: Path, directory: Path, output: IO[Any] | int) -> subprocess.Popen[bytes]:
    """Starts two processes by `lmt launch local`, which a signal to this session does not reach."""
    command = lmt_command("launch", "local", config, "-n", "2", "--devices-per-process", "1")
    return subprocess.Popen(
        command, cwd=directory, env=lmt_environment(), start_new_session=True, stdout=output, stderr=output
    )


def launch(config: Path, directory: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Two processes by `lmt launch local`, and where their output goes."""
    directory.mkdir(exist_ok=True)
    output = directory / f"out-{time.monotonic_ns()}.txt"
    with output.open("wb") as stream:
        return start_launcher(config, directory, stream), output


def of_process(launcher: subprocess.Popen[bytes], index: int) -> int:
    """The pid of one of the processes that a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (found,) = [c for c in children if f"process_id={index}" in Path(f"/proc/{c}/cmdline").read_text()]
    return int(found)


@SLOW
@pytest.mark.optimised
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process to kill in /proc")
def test_a_killed_process_is_named_ends_the_run_and_the_next_start_resumes(
    make_config: MakeConfig, train: Train, tmp_path: Path
) -> None:
    keep = {"save_interval": "1h", "keep": [{"every": 8}]}
    config = make_config(trainer={"num_train_steps": 160, "steps_per_eval": 80, "checkpointer": keep})
    train(config, tmp_path / "one", processes=1, devices=1)

    killed = tmp_path / "killed"
    launcher, output = launch(config, killed)
    metrics = killed / "logs" / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 20):
        assert launcher.poll() is None, output.read_text()
        time.sleep(0.001)
    os.kill(of_process(launcher, 1), signal.SIGKILL)
    assert launcher.wait(timeout=120) == 128 + signal.SIGKILL
    printed = output.read_text()
    assert re.search(r"^process 1 of 2 \(pid \d+\) was killed by SIGKILL$", printed, re.MULTILINE), printed
    named = r"^\[0\] error: process 1 of 2 \(.+, pid \d+\) is gone: it was killed, or its machine was lost"
    assert re.search(named, printed, re.MULTILINE), printed
    assert "sending" not in printed, "the other one ends by itself"

    launcher, output = launch(config, killed)
    assert launcher.wait(timeout=600) == 0, output.read_text()
    assert re.search(r"^\[0\] resumed at step \d+ of 160$", output.read_text(), re.MULTILINE), output.read_text()
    assert numbers(killed) == numbers(tmp_path / "one")


@SLOW
def test_a_process_that_fails_alone_tells_the_others_why(make_config: MakeConfig, tmp_path: Path) -> None:
    """Here the first, at a run directory that is in use, where the other would wait for it."""
    config = make_config(trainer={"num_train_steps": 4})
    (tmp_path / "logs" / "run").mkdir(parents=True)
    with (tmp_path / "logs" / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        launcher, output = launch(config, tmp_path)
        assert launcher.wait(timeout=120) == 2, output.read_text()
    printed = output.read_text()
    assert re.search(r"^\[0\] error: .*is in use by", printed, re.MULTILINE), printed
    assert re.search(r"^\[1\] error: process 0 of 2 \(.+\) stopped: .*is in use by", printed, re.MULTILINE), printed


@pytest.mark.optimised
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("trainer.context_axis_size=2",), marks=SLOW),
        pytest.param(("trainer.context_axis_size=2", "trainer.determinism=fast"), marks=EXHAUSTIVE),
        pytest.param(("trainer.model_axis_size=2", "trainer.tensor_parallel_axes=[mlp,heads]"), marks=EXHAUSTIVE),
        pytest.param(("trainer.pipeline_axis_size=2", "trainer.per_device_parallelism=4"), marks=SLOW),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_a_microbatch_may_be_shared_by_devices_of_two_processes(
    make_config: MakeConfig, train: Train, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = make_config(trainer={"num_train_steps": 4, "steps_per_eval": 2})
    train(config, tmp_path / "one", processes=1, devices=2, overrides=overrides)
    train(config, tmp_path / "two", processes=2, devices=1, overrides=overrides)
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")


@SLOW
@pytest.mark.optimised
def test_turns_of_microbatches_are_the_same_in_two_processes(
    make_config: MakeConfig, train: Train, tmp_path: Path
) -> None:
    """Each process then needs rows that are no neighbours."""
    config = make_config(trainer={"num_train_steps": 4, "steps_per_eval": 2, "determinism": "layerwise"})
    train(config, tmp_path / "one", processes=1, devices=1)
    overrides = ("trainer.microbatches_per_gather=1",)
    train(config, tmp_path / "two", processes=2, devices=1, overrides=overrides)
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")


@SLOW
def test_a_group_that_no_process_holds_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config, overrides = make_config(trainer={"num_train_steps": 4}), ("trainer.context_axis_size=4",)
    (tmp_path / "three").mkdir()
    command = lmt_command("launch", "local", config, "-n", "2", "--devices-per-process", "6", *overrides)
    done = subprocess.run(
        command, cwd=tmp_path / "three", env=lmt_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "context_axis_size=4 is a group of 4 devices, which processes of 6 devices cannot hold" in done.stdout


@pytest.mark.optimised
@pytest.mark.parametrize(
    "determinism", [pytest.param("elastic", marks=SLOW), pytest.param("layerwise", marks=EXHAUSTIVE)]
)
def test_processes_with_unequal_numbers_of_microbatches_are_one_run(
    make_config: MakeConfig, train: Train, tmp_path: Path, determinism: str
) -> None:
    """8 microbatches on 6 devices: 4 in one process, 2 in each of two others."""
    config = make_config(trainer={"num_train_steps": 4, "steps_per_eval": 2, "determinism": determinism})
    train(config, tmp_path / "one", processes=1, devices=1)
    train(config, tmp_path / "three", processes=3, devices=2)
    assert numbers(tmp_path / "three") == numbers(tmp_path / "one")
