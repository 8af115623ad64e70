"""Signals to runs of several processes: all save the same step and end, and the next start goes on from it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hangs import HANG_SECONDS
from tests.run.conftest import MakeConfig, write_config
from tests.run.test_processes import find_process, read_numbers, start_launcher, train_alone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of the launcher in /proc"),
]
STEPS = 120
TRAINER = {"num_train_steps": STEPS, "steps_per_eval": 1000, "steps_per_log": 1}
Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def launch(make_config: MakeConfig, tmp_path: Path) -> Iterator[Launch]:
    """`launch(**trainer)`: two processes by `lmt launch local`, whose output goes to `tmp_path/out`."""
    launchers: list[subprocess.Popen[bytes]] = []

    def start(output: int | None = None, **trainer: Any) -> subprocess.Popen[bytes]:
        config = make_config(trainer={**TRAINER, **trainer})
        with (tmp_path / "out").open("ab") as stream:
            launcher = start_launcher(config, tmp_path, stream if output is None else output)
        launchers.append(launcher)
        return launcher

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def read_output(directory: Path) -> str:
    return (directory / "out").read_text()


def wait_for_steps(launcher: subprocess.Popen[bytes], directory: Path, count: int) -> None:
    """Returns once metrics of so many steps are written."""
    metrics = directory / "logs" / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b'"train/loss"') >= count):
        assert launcher.poll() is None, read_output(directory)
        time.sleep(0.01)


def losses(directory: Path) -> list[tuple[Any, ...]]:
    """The metrics of each step and evaluation, without the lines of checkpoints."""
    return [line for line in read_numbers(directory) if len(line) > 1]


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints" / "run").iterdir() if path.name.isdecimal())


def signal_launcher(launcher: subprocess.Popen[bytes], number: int) -> None:
    launcher.send_signal(number)


def signal_first_process(launcher: subprocess.Popen[bytes], number: int) -> None:
    os.kill(find_process(launcher, 0), number)


def signal_second_process(launcher: subprocess.Popen[bytes], number: int) -> None:
    os.kill(find_process(launcher, 1), number)


@pytest.fixture(scope="module")
def undisturbed(text_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The losses of the run that nothing stops, in one process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    train_alone(write_config(directory / "run.yaml", text_files, {"trainer": TRAINER}), directory, devices=1)
    return losses(directory)


def recorded_steps(directory: Path) -> list[int]:
    """The steps of which metrics are written."""
    lines = (directory / "logs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


@pytest.fixture
def _heeds_hangup() -> Iterator[None]:
    """Has the processes of a test heed SIGHUP, where the tests were started by nohup as well."""
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous_handler)


@pytest.mark.usefixtures("_heeds_hangup")
def test_any_stop_signal_saves_in_all_processes_and_the_next_start_goes_on(
    launch: Launch, undisturbed: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """One run, which each start brings some steps further, until one does not heed SIGHUP and ends it."""
    step = 0
    for number, send in (
        (signal.SIGTERM, signal_second_process),
        (signal.SIGINT, signal_launcher),
        (signal.SIGHUP, signal_launcher),
    ):
        (tmp_path / "out").write_text("")
        terminal = None
        if number == signal.SIGHUP:
            # As where a terminal is closed, to which no process can write any more.
            terminal, child_side = pty.openpty()
            launcher = launch(child_side)
            os.close(child_side)
        else:
            launcher = launch()
        wait_for_steps(launcher, tmp_path, step + 5)
        if terminal is not None:
            os.close(terminal)
        send(launcher, number)
        assert launcher.wait(timeout=120) == 75, read_output(tmp_path)
        begun, step = step, saved_steps(tmp_path)[-1]
        assert begun + 5 <= step < STEPS
        assert recorded_steps(tmp_path) == [*range(1, step + 1)], "no metric of a saved step is lost"
        if terminal is None:
            pattern = rf"^\[\d\] stopped by (.+) after step {step}; everything is saved"
            causes = re.findall(pattern, read_output(tmp_path), re.MULTILINE)
            assert len(causes) == 2, read_output(tmp_path)
            assert number.name in causes
            assert not begun or f"resumed at step {begun} of {STEPS}" in read_output(tmp_path)

    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    try:
        launcher = launch()
    finally:
        signal.signal(signal.SIGHUP, previous_handler)
    wait_for_steps(launcher, tmp_path, step + 5)
    launcher.send_signal(signal.SIGHUP)
    signal_first_process(launcher, signal.SIGHUP)
    assert launcher.wait(timeout=120) == 0, read_output(tmp_path)
    assert f"resumed at step {step} of {STEPS}" in read_output(tmp_path)
    assert losses(tmp_path) == undisturbed


def test_a_signal_for_a_checkpoint_to_one_of_two_processes(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(num_train_steps=100_000, checkpointer={"keep": [{"every": 100_000}]})
    wait_for_steps(launcher, tmp_path, 5)
    signal_second_process(launcher, signal.SIGUSR1)
    while not (first_saved := saved_steps(tmp_path) if (tmp_path / "checkpoints" / "run").exists() else []):
        assert launcher.poll() is None, read_output(tmp_path)
        time.sleep(0.01)
    # Both files are looked for at the same moment.
    for name in ("stop-after-save", "save-now"):
        (tmp_path / "logs/run" / name).touch()
    assert launcher.wait(timeout=120) == 76, read_output(tmp_path)
    assert read_output(tmp_path).count("stopped by stop-after-save after step") == 2
    assert saved_steps(tmp_path)[0] == first_saved[0]
    assert len(saved_steps(tmp_path)) == 2


def test_a_second_signal_ends_all_at_once(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(num_train_steps=100_000)
    wait_for_steps(launcher, tmp_path, 5)
    # A process that is stopped by the system cannot save: the first signal alone would wait for ever, and the other
    # process waits for it inside a computation, where Python calls no handlers.
    stopped = find_process(launcher, 1)
    os.kill(stopped, signal.SIGSTOP)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    launcher.send_signal(signal.SIGTERM)
    os.kill(stopped, signal.SIGCONT)
    assert launcher.wait(timeout=HANG_SECONDS) == 128 + signal.SIGTERM, read_output(tmp_path)
