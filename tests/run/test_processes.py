"""Several processes that train one run: the bits of one process, and a resume by another number of them."""

from __future__ import annotations

import contextlib
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

from tests.conftest import StartLmt, lmt_environment, run_here
from tests.run.conftest import MakeConfig
from tests.run.test_adapters import write_base
from tests.run.test_preference_run import preference_changes

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
STEPS = 48


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


Group = Callable[..., list[tuple[int, str]]]
Train = Callable[..., None]


@pytest.fixture
def run_group(start_lmt: StartLmt) -> Group:
    """`run_group(config, directory, processes=2, devices=1, overrides=())`: one run of several processes, to its end.

    Returns the exit code of each, and what it printed.
    """

    def run(
        config: Path, directory: Path, *, processes: int, devices: int, overrides: tuple[str, ...] = ()
    ) -> list[tuple[int, str]]:
        directory.mkdir(exist_ok=True)
        port = free_port()
        outputs, running = [directory / f"out.{index}" for index in range(processes)], []
        for index, output in enumerate(outputs):
            together = (
                f"trainer.distributed.coordinator_address=127.0.0.1:{port}",
                f"trainer.distributed.num_processes={processes}",
                f"trainer.distributed.process_id={index}",
            )
            settings = (*overrides, *together)
            running.append(start_lmt("train", config, *settings, cwd=directory, devices=devices, output=output))
        codes = [process.wait(timeout=600) for process in running]
        return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]

    return run


@pytest.fixture
def train(run_group: Group) -> Train:
    """`train(config, directory, processes=2, devices=1, overrides=())`: as `run_group`, for a run that succeeds."""

    def run(config: Path, directory: Path, **settings: Any) -> None:
        ended = run_group(config, directory, **settings)
        assert [code for code, _ in ended] == [0] * len(ended), "\n".join(text for _, text in ended)

    return run


def train_alone(config: Path, directory: Path, *, devices: int, overrides: tuple[str, ...] = ()) -> str:
    """Trains in this process alone, to the end; returns what was printed."""
    directory.mkdir(exist_ok=True)
    with contextlib.chdir(directory):
        done = run_here("train", config, f"trainer.max_devices={devices}", *overrides)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_numbers(directory: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (directory / "logs" / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "train/loss", "optim/grad_norm", "eval/loss", "params/norm/total")
    return [tuple(line[key] for key in keys if key in line) for line in lines]


KEEPING = f"""#!{sys.executable}
import runpy, sys

from tests.compiling import keep_all_programs

keep_all_programs()
del sys.argv[:2]
runpy.run_module("lm_trainer", run_name="__main__", alter_sys=True)
"""
"""An interpreter for `python -m lm_trainer` that keeps what it compiles."""


def caching_lmt_command(directory: Path, *args: str | Path) -> list[str]:
    """The command line of `lmt` that starts other processes, which keep what they compile in the cache of tests."""
    python = directory / "python"
    python.write_text(KEEPING)
    python.chmod(0o755)
    # `supervise` begins each process with the interpreter that there is when it is imported.
    supervised = "import sys, lm_trainer.launch.supervise; from cli.main import main"
    program = f"{supervised}; sys.executable = {str(python)!r}; main()"
    return [sys.executable, "-c", program, *map(str, args)]


def start_launcher(config: Path, directory: Path, output: IO[Any] | int, *options: str) -> subprocess.Popen[bytes]:
    """Starts two processes by `lmt launch local`, which a signal to this session does not reach."""
    devices = ("--devices-per-process", "1")
    command = caching_lmt_command(directory, "launch", "local", config, "-n", "2", *devices, *options)
    return subprocess.Popen(
        command, cwd=directory, env=lmt_environment(), start_new_session=True, stdout=output, stderr=output
    )


def find_process(launcher: subprocess.Popen[bytes], index: int) -> int:
    """The pid of one of the processes that a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (process_id,) = [c for c in children if f"process_id={index}" in Path(f"/proc/{c}/cmdline").read_text()]
    return int(process_id)


@SLOW
@pytest.mark.optimised
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process to kill in /proc")
def test_two_processes_are_one_run_though_one_is_killed_and_one_alone_ends_it(
    make_config: MakeConfig, train: Train, tmp_path: Path
) -> None:
    """The killed one is named and ends the run, which two processes go on with, and then one with two devices."""
    watch = {"interval": 5, "include_per_parameter_norms": False, "watch_targets": ["params"]}
    keep = {"save_interval": "1h", "keep": [{"every": 8}]}
    config = make_config(
        trainer={"num_train_steps": STEPS, "steps_per_eval": STEPS // 2, "watch": watch, "checkpointer": keep}
    )
    train_alone(config, tmp_path / "one", devices=1)
    reference = read_numbers(tmp_path / "one")
    assert len(reference) >= STEPS + 2

    two = tmp_path / "two"
    two.mkdir()
    metrics, checkpoints = two / "logs" / "run" / "metrics.jsonl", two / "checkpoints" / "run"
    with (two / "out.killed").open("w+b") as output:
        launcher = start_launcher(config, two, output)
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 20):
            assert launcher.poll() is None, (two / "out.killed").read_text()
            time.sleep(0.001)
        os.kill(find_process(launcher, 1), signal.SIGKILL)
        assert launcher.wait(timeout=120) == 128 + signal.SIGKILL
    printed = (two / "out.killed").read_text()
    assert re.search(r"^process 1 of 2 \(pid \d+\) was killed by SIGKILL$", printed, re.MULTILINE), printed
    named = r"^\[0\] error: process 1 of 2 \(.+, pid \d+\) is gone: it was killed, or its machine was lost"
    assert re.search(named, printed, re.MULTILINE), printed
    assert "sending" not in printed, "the other one ends by itself"

    # Checkpoints in parts, because no array fits in a kilobyte.
    train(config, two, processes=2, devices=1, overrides=("trainer.checkpointer.host_memory_gb=1e-6",))
    printed = (two / "out.0").read_text()
    assert re.search(rf"^resumed at step \d+ of {STEPS}$", printed, re.MULTILINE), printed
    assert (two / "out.1").read_bytes().count(b"step ") == 0, "only the first process speaks"
    assert read_numbers(two) == reference

    for step in (STEPS, STEPS - 8):
        (checkpoints / str(step)).rename(tmp_path / f"gone.{step}")
    assert f"resumed at step {STEPS - 16} of {STEPS}" in train_alone(config, two, devices=2)
    assert read_numbers(two) == reference


@SLOW
def test_a_process_that_fails_alone_tells_the_others_why(
    make_config: MakeConfig, run_group: Group, tmp_path: Path
) -> None:
    """Here the first, at a run directory that is in use, where the other would wait for it."""
    config = make_config(trainer={"num_train_steps": 4})
    (tmp_path / "logs" / "run").mkdir(parents=True)
    with (tmp_path / "logs" / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (first, first_output), (second, second_output) = run_group(config, tmp_path, processes=2, devices=1)
    assert (first, second) == (2, 2), first_output + second_output
    assert re.search(r"^error: .*is in use by", first_output, re.MULTILINE), first_output
    assert re.search(r"^error: process 0 of 2 \(.+\) stopped: .*is in use by", second_output, re.MULTILINE), (
        second_output
    )


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
    train_alone(config, tmp_path / "one", devices=2, overrides=overrides)
    train(config, tmp_path / "two", processes=2, devices=1, overrides=overrides)
    assert read_numbers(tmp_path / "two") == read_numbers(tmp_path / "one")


@SLOW
def test_turns_of_microbatches_are_the_same_in_two_processes(
    make_config: MakeConfig, train: Train, tmp_path: Path
) -> None:
    """Each process then needs rows that are no neighbours."""
    config = make_config(trainer={"num_train_steps": 4, "steps_per_eval": 2, "determinism": "layerwise"})
    train_alone(config, tmp_path / "one", devices=1)
    overrides = ("trainer.microbatches_per_gather=1",)
    train(config, tmp_path / "two", processes=2, devices=1, overrides=overrides)
    assert read_numbers(tmp_path / "two") == read_numbers(tmp_path / "one")


@SLOW
def test_a_group_that_no_process_holds_is_refused(make_config: MakeConfig, run_group: Group, tmp_path: Path) -> None:
    config, overrides = make_config(trainer={"num_train_steps": 4}), ("trainer.context_axis_size=4",)
    for code, printed in run_group(config, tmp_path / "three", processes=2, devices=6, overrides=overrides):
        assert code == 2
        assert "context_axis_size=4 is a group of 4 devices, which processes of 6 devices cannot hold" in printed


@pytest.mark.parametrize(
    "determinism", [pytest.param("elastic", marks=SLOW), pytest.param("layerwise", marks=EXHAUSTIVE)]
)
def test_processes_with_unequal_numbers_of_microbatches_are_one_run(
    make_config: MakeConfig, train: Train, tmp_path: Path, determinism: str
) -> None:
    """8 microbatches on 6 devices: 4 in one process, 2 in each of two others."""
    config = make_config(trainer={"num_train_steps": 4, "steps_per_eval": 2, "determinism": determinism})
    train_alone(config, tmp_path / "one", devices=1)
    train(config, tmp_path / "three", processes=3, devices=2)
    assert read_numbers(tmp_path / "three") == read_numbers(tmp_path / "one")


@SLOW
def test_predictions_of_a_frozen_model_are_gathered_from_all_processes(
    make_config: MakeConfig, train: Train, in_tmp_path: Path
) -> None:
    write_base(Path("base"), seed=0)
    changes = preference_changes({"type": "dpo", "precompute": True})
    changes["trainer"] |= {"initialize_from": str(in_tmp_path / "base"), "num_train_steps": 3}
    changes["data"] |= {
        key: [str(in_tmp_path / f"{key.partition('_')[0]}.jsonl")] for key in ("train_urls", "validation_urls")
    }
    config = make_config(**changes)
    train_alone(config, in_tmp_path / "one", devices=1)
    # Each process then has rows that are no neighbours.
    overrides = ("trainer.microbatches_per_gather=1",)
    train(config, in_tmp_path / "two", processes=2, devices=1, overrides=overrides)
    assert read_numbers(in_tmp_path / "two") == read_numbers(in_tmp_path / "one")
    files = [
        {path.relative_to(run): path.read_bytes() for path in run.glob("cache/*/frozen-*/**/*") if path.is_file()}
        for run in (in_tmp_path / "one", in_tmp_path / "two")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 6, "manifest, number of rows and a part, of training and held-out rows"
