"""Weights & Biases offline: what it writes, and what it must never hold."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.trackers import WandbConfig, open_trackers, read_metrics
from lm_trainer.trackers.wandb import git_tracked_files
from tests.conftest import ROOT, lmt_environment
from tests.hangs import HANG_SECONDS
from tests.trackers.two_steps import train_two_steps

SECRET = "4f3c" * 10


@pytest.fixture
def wandb(monkeypatch) -> Any:
    module = pytest.importorskip("wandb", reason='needs `pip install "lm_trainer[wandb]"`')
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return module


def read_frames(file: Path) -> Iterator[bytes]:
    """The records of a transaction log: LevelDB's log format after a header of 7 bytes."""
    data, position, partial = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = -position % 32768 or 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            return  # cut off
        partial += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield partial
            partial = b""


def read_records(run_dir: Path, attempts: int = 1, *, finished: bool = True) -> list[Any]:
    """The records of the attempts at a run, each of which writes a log; 0: of any number of them.

    If the last attempt has finished, this waits for the end of its log: W&B's own process writes it later.
    """
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + HANG_SECONDS
    while True:
        files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
        assert attempts in (0, len(files))
        records = [wandb_internal_pb2.Record.FromString(frame) for file in files for frame in read_frames(file)]  # pyright: ignore[reportAttributeAccessIssue]
        if not finished or (records and records[-1].WhichOneof("record_type") == "exit"):
            return records
        assert time.monotonic() < deadline, "the log has no end"
        time.sleep(0.01)


def read_history(run_dir: Path, attempts: int = 1, *, finished: bool = True) -> list[dict[str, Any]]:
    """The rows of the attempts at a run, as `read_records`."""
    records = read_records(run_dir, attempts, finished=finished)
    rows = [r.history.item for r in records if r.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in rows]


def test_a_run_offline(wandb, tmp_path):
    config = WandbConfig(project="p", entity="e", tags=("a", "b"), save_code=False)
    with contextlib.closing(open_trackers([config], run_dir=tmp_path, run_id="my-run")) as trackers:
        trackers.log_config({"model": {"num_layers": 2}})
        trackers.log({"train/loss": 2.5}, step=1)
        trackers.log({"eval/loss": math.nan}, step=1)
        trackers.log_summary({"parameters": 12})
    run = next(r.run for r in read_records(tmp_path) if r.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.project, run.entity) == ("my-run", "my-run", "p", "e")
    assert sorted(run.tags) == ["a", "b"]
    assert not [r for r in read_records(tmp_path) if r.WhichOneof("record_type") == "artifact"], "save_code is false"
    rows = read_history(tmp_path)
    assert [row["global_step"] for row in rows] == [1, 1]
    assert rows[0]["train/loss"] == 2.5
    assert len(read_metrics(tmp_path)) == 2


def test_a_page_is_a_chart(wandb, tmp_path):
    (tmp_path / "page.html").write_text("<!doctype html><p>probabilities</p>")
    with contextlib.closing(open_trackers([WandbConfig(save_code=False)], run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log({"train/loss": 2.5}, step=3)
        trackers.log_artifact("token-probabilities", tmp_path / "page.html", type="html")
    rows = [row for row in read_history(tmp_path) if "token-probabilities" in str(row)]
    assert len(rows) == 1
    assert rows[0]["global_step"] == 3
    assert "html-file" in str(rows[0])
    (copy,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "probabilities" in copy.read_text()


@pytest.mark.slow
def test_steps_that_come_again_after_a_resume_are_kept(wandb, tmp_path):
    for first in (1, 2):
        (tmp_path / str(first)).mkdir()
    train_two_steps(tmp_path / "1", 1)
    # A resumed run is a process of its own; within one, W&B may confuse two runs of one id.
    resumed = [sys.executable, "-m", "tests.trackers.two_steps", tmp_path / "2", "2"]
    subprocess.run(resumed, cwd=ROOT, env=lmt_environment(), check=True)
    resumed_rows = read_history(tmp_path / "2")
    assert [(row["global_step"], row["train/loss"]) for row in resumed_rows] == [(2, 1 / 2), (3, 1 / 3)]


def test_no_secret_is_written(wandb, tmp_path, monkeypatch):
    few = dict(list(git_tracked_files().items())[:9])
    monkeypatch.setattr("lm_trainer.trackers.wandb.git_tracked_files", lambda: few)
    with contextlib.closing(open_trackers([WandbConfig()], run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log_config({"url": f"https://me:{SECRET}@host/x"})
        trackers.log({"train/loss": 2.5}, step=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def git(directory: Path, *command: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "-C", str(directory), *identity, *command], check=True, capture_output=True)


def test_the_code_that_is_saved_is_what_git_tracks():
    sources = git_tracked_files()
    if not sources:
        pytest.skip("not a checkout")
    assert "lm_trainer/trackers/wandb.py" in sources
    assert [name for name in sources if name.startswith(".") or "/." in name] == []


def test_the_code_of_the_main_script_is_saved(tmp_path, monkeypatch):
    git(tmp_path, "init")
    for name in ("scripts/train.py", "model.py", ".env", "untracked.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass")
    (tmp_path / "large.bin").write_bytes(bytes(1 << 21))
    git(tmp_path, "add", "scripts", "model.py", ".env", "large.bin")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "scripts/train.py"), raising=False)
    assert git_tracked_files() == {name: tmp_path / name for name in ("model.py", "scripts/train.py")}
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "untracked.py"), raising=False)
    assert "model.py" not in git_tracked_files()


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({}, {"resume": "allow", "mode": None, "group": None, "name": "r", "id": "r"}),
        ({"resume": "must", "mode": "offline"}, {"resume": "must", "mode": "offline"}),
        ({"group": "g", "name": "n", "id": "i"}, {"group": "g", "name": "n", "id": "i"}),
    ],
    ids=str,
)
def test_fields_reach_wandb(wandb, tmp_path, monkeypatch, fields, passed):
    arguments: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        arguments.update(options)
        raise wandb.errors.UsageError("seen")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match="W&B refused to start: seen"):
        open_trackers([WandbConfig(**fields)], run_dir=tmp_path, run_id="r")
    assert {name: arguments[name] for name in passed} == passed


def test_histograms_and_artifacts_are_kept(wandb, tmp_path):
    (tmp_path / "hlo").mkdir()
    (tmp_path / "hlo/step.txt").write_text("HloModule")
    (tmp_path / "config.yaml").write_text("model: {}")
    config = WandbConfig(save_code=False)
    with contextlib.closing(open_trackers([config], run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log_histogram("grads", np.array([3, 5]), np.array([0.0, 1.0, 2.0]), step=4)
        trackers.log_artifact("config", tmp_path / "config.yaml", type="config")
        trackers.log_artifact("hlo", tmp_path / "hlo", type="program")
    (row,) = read_history(tmp_path)
    assert (row["global_step"], row["grads/values"], row["grads/bins"]) == (4, [3, 5], [0, 1, 2])
    artifacts = {
        r.artifact.name: r.artifact for r in read_records(tmp_path) if r.WhichOneof("record_type") == "artifact"
    }
    assert {n: (a.type, [e.path for e in a.manifest.contents]) for n, a in artifacts.items()} == {
        "config-r": ("config", ["config.yaml"]),
        "hlo-r": ("program", ["step.txt"]),
    }


def test_dumps_that_nobody_asks_xla_for_are_refused(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_xnnpack=false")
    with pytest.raises(UserError, match="--xla_dump_to=DIRECTORY"):
        open_trackers([WandbConfig(save_xla_dumps=True)], run_dir=tmp_path, run_id="r")


def test_dumps_are_saved_at_the_end(wandb, tmp_path, monkeypatch):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "module_0001.txt").write_text("HloModule")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={dumps} --xla_dump_hlo_as_text")
    config = WandbConfig(save_xla_dumps=True, save_code=True)
    with contextlib.closing(open_trackers([config], run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log_config({})
        trackers.log_text("sample", "def f(): ...", step=1)
    artifacts = {
        r.artifact.type: r.artifact for r in read_records(tmp_path) if r.WhichOneof("record_type") == "artifact"
    }
    assert [entry.path for entry in artifacts["xla_dumps"].manifest.contents] == ["module_0001.txt"]
    if git_tracked_files():
        assert "cli/__init__.py" in [entry.path for entry in artifacts["source"].manifest.contents]


def test_alerts_are_those_of_the_service(wandb, tmp_path):
    with contextlib.closing(open_trackers([WandbConfig(mode="offline")], run_dir=tmp_path, run_id="r")) as trackers:
        trackers.log_alert("loss_spike", "the loss is 9", step=4)
    (alert,) = [r.alert for r in read_records(tmp_path) if r.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.text, alert.level) == ("loss_spike", "step 4: the loss is 9", "WARN")
