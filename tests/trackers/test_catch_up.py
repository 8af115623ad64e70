"""Trackers that lack lines of steps that are done get them at the next start, and people are told which."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_trainer.trackers import JsonlConfig, TensorboardConfig, TrackioConfig, WandbConfig, read_metrics
from lm_trainer.trackers.base import TrackedRun
from lm_trainer.trackers.series import Series
from tests.conftest import ROOT, lmt_environment
from tests.trackers.killed_attempt import STEPS, attempt
from tests.trackers.test_tensorboard import read_events
from tests.trackers.test_trackio import read_rows
from tests.trackers.test_wandb import read_history


def lines(file: Path) -> list[str]:
    """The lines of a file without their times."""
    return [re.sub(r'"time": [0-9.]+, ', "", line) for line in file.read_text().splitlines()]


def test_a_copy_that_lacks_lines_is_a_copy_again(tmp_path: Path) -> None:
    copy, config = tmp_path / "copies/my-run", JsonlConfig(path=str(tmp_path / "copies"))
    run_dir = tmp_path / "run"
    attempt(run_dir, config, 1, STEPS)
    assert lines(copy / "metrics.jsonl") == lines(run_dir / "metrics.jsonl")
    copied = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    # In the middle as well as at the end.
    (copy / "metrics.jsonl").write_text(
        "".join(line for line in copied if '"step": 2' not in line and "f6" not in line)
    )
    (copy / "histograms.jsonl").unlink()
    (note,) = attempt(run_dir, config, STEPS + 1, STEPS + 2)
    assert note == (
        "the jsonl tracker lacked lines of steps that are done, and now has them from metrics.jsonl: train/loss of 2; "
        "eval/loss of 2; fingerprint of 2 and 6; grads/w of 2, 4 and 6"
    )
    for name in ("metrics.jsonl", "texts.jsonl", "histograms.jsonl"):
        assert lines(copy / name) == lines(run_dir / name)
    assert [line["step"] for line in read_metrics(copy) if "train/loss" in line] == [*range(1, STEPS + 3)]
    assert attempt(run_dir, config, STEPS + 3, STEPS + 3) == []


def test_a_copy_that_is_added_later_or_vanishes_has_all_steps(tmp_path: Path) -> None:
    copy, config = tmp_path / "copies/my-run", JsonlConfig(path=str(tmp_path / "copies"))
    attempt(tmp_path / "run", None, 1, STEPS)
    for first in (STEPS + 1, STEPS + 2):
        (note,) = attempt(tmp_path / "run", config, first, first)
        assert f"train/loss of 1 to {first - 1}; eval/loss of 2, 4" in note
        assert lines(copy / "metrics.jsonl") == lines(tmp_path / "run/metrics.jsonl")
        shutil.rmtree(copy)


def read_trackio_steps(project: str) -> dict[str, list[Any]]:
    rows = read_rows(project)
    names = ("train/loss", "eval/loss", "grads/w", "sample")
    return {name: sorted(row["step"] for row in rows if f'"{name}"' in str(row["metrics"])) for name in names}


def log_and_kill(run_dir: Path, **config: Any) -> None:
    """Logs the first steps in a process that is killed, with what it has started, right after the last one."""
    command = [sys.executable, "-m", "tests.trackers.killed_attempt", run_dir, json.dumps(config)]
    ended = subprocess.run(command, cwd=ROOT, env=lmt_environment(), check=False, start_new_session=True)
    assert ended.returncode == -signal.SIGKILL


@pytest.fixture
def project() -> str:
    pytest.importorskip("trackio", reason='needs `pip install "lm_trainer[trackio]"`')
    return f"test-{uuid.uuid4().hex[:8]}"


def check_trackio_catches_up(run_dir: Path, project: str, lost: str) -> None:
    config = TrackioConfig(project=project)
    (note,) = attempt(run_dir, config, STEPS + 1, STEPS + 2)
    assert note.startswith("the trackio tracker lacked lines of steps that are done")
    assert note.endswith(lost)
    assert read_trackio_steps(project) == {
        "train/loss": [*range(1, STEPS + 3)],
        "eval/loss": [2, 4, 6, 8],
        "grads/w": [2, 4, 6, 8],
        "sample": [6, 8],
    }
    assert attempt(run_dir, config, STEPS + 3, STEPS + 3) == []


def test_trackio_gets_what_its_database_lacks(tmp_path: Path, project: str) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    attempt(tmp_path / "run", TrackioConfig(project=project), 1, STEPS)
    with contextlib.closing(sqlite3.connect(SQLiteStorage.get_project_db_path(project))) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE step >= 4")
    lost = "train/loss of 4 to 6; eval/loss of 4 and 6; sample of 6; grads/w of 4 and 6"
    check_trackio_catches_up(tmp_path / "run", project, lost)


@pytest.mark.slow
def test_trackio_gets_what_a_kill_took(tmp_path: Path, project: str) -> None:
    """Trackio keeps half a second of what is logged in memory alone."""
    log_and_kill(tmp_path / "run", type="trackio", project=project)
    check_trackio_catches_up(tmp_path / "run", project, "")


def read_wandb_steps(run_dir: Path, *, finished: bool = True) -> dict[str, list[int]]:
    rows = read_history(run_dir, attempts=0, finished=finished)
    names = ("train/loss", "eval/loss", "grads/w/values", "sample/path")
    return {name: sorted(row["global_step"] for row in rows if name in row) for name in names}


def read_tensorboard_steps(run_dir: Path) -> dict[str, list[int]]:
    """The steps of what TensorBoard shows, by tag; a start hides earlier events of its step and later."""
    shown: dict[str, list[int]] = {}
    for event in read_events(run_dir / "tensorboard"):
        if event.session_log.status:
            shown = {tag: [step for step in steps if step < event.step] for tag, steps in shown.items()}
        for value in event.summary.value:
            shown.setdefault(value.tag, []).append(event.step)
    return {tag: shown[tag] for tag in ("train/loss", "eval/loss", "grads/w", "sample/text_summary")}


def test_tensorboard_gets_what_it_missed_in_the_order_of_steps(tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", TensorboardConfig()
    attempt(run_dir, config, 1, 3)
    # Without the tracker, as if it had been switched off.
    attempt(run_dir, None, 4, 5)
    # These steps are done again: they are hidden, and no gap.
    assert attempt(run_dir, config, 4, STEPS) == []
    attempt(run_dir, None, STEPS + 1, STEPS + 2)
    (note,) = attempt(run_dir, config, STEPS + 3, STEPS + 3)
    assert note.endswith("train/loss of 7 to 8; eval/loss of 8; sample of 8; grads/w of 8")
    complete = {
        "train/loss": [*range(1, STEPS + 4)],
        "eval/loss": [2, 4, 6, 8],
        "grads/w": [2, 4, 6, 8],
        "sample/text_summary": [3, 6, 8, 9],
    }
    assert read_tensorboard_steps(run_dir) == complete
    shutil.rmtree(run_dir / "tensorboard")
    (note,) = attempt(run_dir, config, STEPS + 4, STEPS + 3)
    assert read_tensorboard_steps(run_dir)["train/loss"] == complete["train/loss"]
    # An attempt that ends before its first step leaves a start alone; a line cut off by a kill comes again.
    assert attempt(run_dir, config, STEPS + 4, STEPS + 3) == []
    for file in (run_dir / "tensorboard").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: content.rfind(b"train/loss")])
    (note,) = attempt(run_dir, config, STEPS + 4, STEPS + 3)
    assert note.endswith(": train/loss of 9; sample of 9")
    assert read_tensorboard_steps(run_dir)["train/loss"] == complete["train/loss"]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("wandb", reason='needs `pip install "lm_trainer[wandb]"`')
    monkeypatch.setenv("WANDB_MODE", "offline")
    return module


def test_wandb_offline_gets_what_its_log_has_lost(wandb: Any, tmp_path: Path) -> None:
    config, run_dir = WandbConfig(save_code=False), tmp_path / "run"
    attempt(run_dir, config, 1, STEPS)
    complete = read_wandb_steps(run_dir)
    assert complete["train/loss"] == [*range(1, STEPS + 1)]
    (log,) = run_dir.glob("wandb/offline-run-*/run-my-run.wandb")
    content = log.read_bytes()
    # The end is cut off until steps are lost: how much else the log holds depends on the machine.
    for size in range(len(content), 0, -100):
        log.write_bytes(content[:size])
        kept = read_wandb_steps(run_dir, finished=False)
        if len(kept["train/loss"]) <= STEPS // 2:
            break
    lost = {name: sorted({*steps} - {*kept[name]}) for name, steps in complete.items()}
    assert 0 < len(lost["train/loss"]) < STEPS
    (note,) = attempt(run_dir, config, STEPS + 1, STEPS + 2)
    assert "the wandb tracker lacked lines of steps that are done" in note
    assert read_wandb_steps(run_dir) == {
        "train/loss": [*range(1, STEPS + 3)],
        "eval/loss": [2, 4, 6, 8],
        "grads/w/values": [2, 4, 6, 8],
        "sample/path": [6, 8],
    }


def test_wandb_offline_reads_the_log_of_a_second_start_within_a_second(wandb: Any, tmp_path: Path) -> None:
    config, run_dir = WandbConfig(save_code=False), tmp_path / "run"
    attempt(run_dir, config, 1, STEPS)
    assert read_wandb_steps(run_dir)["train/loss"] == [*range(1, STEPS + 1)]
    (directory,) = run_dir.glob("wandb/offline-run-*")
    # W&B's own name for it, in `_WandbInit.set_sync_dir_suffix`.
    directory.rename(f"{directory}-1")
    assert attempt(run_dir, config, STEPS + 1, STEPS + 1) == []


@pytest.mark.slow
def test_wandb_offline_gets_what_a_kill_took(wandb: Any, tmp_path: Path) -> None:
    config, run_dir = WandbConfig(save_code=False), tmp_path / "run"
    log_and_kill(run_dir, type="wandb", save_code=False)
    lost = {*range(1, STEPS + 1)} - {*read_wandb_steps(run_dir, finished=False)["train/loss"]}
    notes = attempt(run_dir, config, STEPS + 1, STEPS + 2)
    assert bool(lost) == any("train/loss" in note for note in notes)
    assert read_wandb_steps(run_dir)["train/loss"] == [*range(1, STEPS + 3)]
    assert attempt(run_dir, config, STEPS + 3, STEPS + 3) == []


def test_the_server_of_wandb_is_believed_about_its_last_step(wandb: Any, tmp_path: Path) -> None:
    """There is no server here; a resumed run brings the values of its last step along."""
    lines = {"metrics.jsonl": Series({"train/loss": [[1, 6, 1]], "fingerprint": [[6, 6, 1]]})}
    missing = []
    with contextlib.closing(WandbConfig(save_code=False).open(TrackedRun(tmp_path, "r", 6))) as tracker:
        real: Any = tracker._run
        for resumed, summary in [(True, {"global_step": 4}), (True, {}), (True, {"global_step": 9}), (False, {})]:
            online: Any = SimpleNamespace(disabled=False, offline=False, resumed=resumed, summary=summary)
            tracker._run = online
            missing.append(tracker.missing_lines(lines))
        tracker._run = real
    of_steps = [{"metrics.jsonl": {"train/loss": {*range(first, 7)}}} for first in (5, 1)]
    assert missing == [of_steps[0], {}, {}, of_steps[1]]
