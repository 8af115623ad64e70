"""Warnings of the watchdog about a run that hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from lm_trainer.health.watchdog import Watchdog, WatchdogConfig
from lm_trainer.run.trainer import Trainer
from tests.conftest import lmt_environment
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings

MINUTE = WatchdogConfig(timeout=timedelta(minutes=1))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, watchdog: Watchdog, seconds: int) -> None:
        """Time in which the watchdog looks as often as its thread would."""
        for _ in range(seconds // 10):
            self.now += 10
            watchdog.check()


@pytest.mark.parametrize("timeout", ["0s", "-1s", "10"])
def test_timeouts_that_cannot_be(timeout: str) -> None:
    with pytest.raises(ValidationError):
        WatchdogConfig.model_validate({"timeout": timeout})


def test_what_takes_too_long_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clock, codes = Clock(), []
    watchdog = Watchdog(MINUTE, tmp_path, clock=clock, exit=codes.append)
    for step in range(3):
        watchdog.arm(f"the batch of step {step}")
        clock.pass_time(watchdog, 50)
    watchdog.disarm()
    clock.pass_time(watchdog, 500)
    assert capfd.readouterr().err == ""

    watchdog.arm("the checkpoint of step 7")
    clock.pass_time(watchdog, 300)
    output = capfd.readouterr().err
    assert output.count("watchdog: no progress for 60 s, waiting for the checkpoint of step 7") == 1
    assert str(tmp_path / "stacks.txt") in output
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "test_what_takes_too_long_is_named_once" in stacks
    assert stacks.count("waiting for the checkpoint of step 7") == 1
    assert codes == []

    watchdog.arm("step 8")
    clock.pass_time(watchdog, 60)
    assert "waiting for step 8" in capfd.readouterr().err


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = Watchdog(MINUTE, tmp_path, clock=clock)
    watchdog.arm("step 1")
    clock.pass_time(watchdog, 30)
    clock.now += 3600
    clock.pass_time(watchdog, 50)
    assert not (tmp_path / "stacks.txt").exists()
    clock.pass_time(watchdog, 30)
    assert (tmp_path / "stacks.txt").exists()


def test_each_item_has_the_whole_time(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = Watchdog(MINUTE, tmp_path, clock=clock)
    for _ in watchdog.time_items(range(5), "the evaluation"):
        clock.pass_time(watchdog, 50)
    assert not (tmp_path / "stacks.txt").exists()
    clock.pass_time(watchdog, 60)
    assert "waiting for the evaluation" in (tmp_path / "stacks.txt").read_text()


def test_stacks_that_cannot_be_written_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    watchdog = Watchdog(MINUTE, tmp_path / "gone", clock=clock)
    watchdog.arm("step 1")
    clock.pass_time(watchdog, 60)
    output = capfd.readouterr().err
    assert "test_stacks_that_cannot_be_written_are_shown" in output
    assert "the stacks of all threads are above" in output


def test_a_run_that_waits_for_its_data_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real thread and clock: the data wait until the watchdog has warned."""
    monkeypatch.chdir(tmp_path)
    stacks = tmp_path / "own" / "stacks.txt"

    class Stuck(Numbered):
        def train(self, *args, **kwargs):
            for step, batch in enumerate(super().train(*args, **kwargs)):
                while step == 2 and "batch of step 3" not in (stacks.read_text() if stacks.exists() else ""):
                    time.sleep(0.01)
                yield batch

    config = settings(watchdog={"timeout": "300ms"}, log_dir=".", num_train_steps=4)
    with Trainer(config, OPTIMIZER, loss) as trainer:
        state = trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Stuck()))
    assert state.step == 4
    assert "waiting for the batch of step 3" in capfd.readouterr().err


HANG = """
import time
from datetime import timedelta
from pathlib import Path
from lm_trainer.health.watchdog import Watchdog, WatchdogConfig
with Watchdog(WatchdogConfig(timeout=timedelta(seconds=0.2), abort=True), Path(".")) as watchdog:
    watchdog.arm("a mount that is dead")
    time.sleep(600)
"""


def test_a_run_that_hangs_can_be_ended_for_the_scheduler_to_start_it_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANG]
    done = subprocess.run(command, cwd=tmp_path, env=lmt_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert "waiting for a mount that is dead" in done.stderr
    assert "ending with exit code 75" in done.stderr
    assert 'File "<string>", line 8 in <module>' in (tmp_path / "stacks.txt").read_text()
    assert json.dumps(WatchdogConfig().model_dump(mode="json")) == '{"timeout": "10m", "abort": false}'
