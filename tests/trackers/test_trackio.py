"""Trackio on the own machine: what it stores, and that a resumed run goes on in the same place."""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.trackers import TrackioConfig, open_trackers

trackio = pytest.importorskip("trackio", reason='needs `pip install "lm_trainer[trackio]"`')


@pytest.fixture
def project() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def read_rows(project: str) -> list[dict[str, Any]]:
    """The rows of the project's database, in the order in which they were written."""
    from trackio.sqlite_storage import SQLiteStorage

    with contextlib.closing(sqlite3.connect(SQLiteStorage.get_project_db_path(project))) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM metrics ORDER BY id")]


def open_run(project: str, run_dir: Path, **options: Any) -> Any:
    config = TrackioConfig(project=project, name=options.pop("name", None), group=options.pop("group", None))
    return open_trackers([config], run_dir=run_dir, run_id="my-run", **options)


def test_a_run_on_the_own_machine(project, tmp_path, capsys):
    with contextlib.closing(open_run(project, tmp_path, group="g")) as trackers:
        trackers.log_config({"model": {"num_layers": 2}})
        trackers.log({"train/loss": 2.5}, step=1)
        trackers.log({"eval/loss": 1.5}, step=1)
        trackers.log_histogram("grads", np.array([3, 5]), np.array([0.0, 1.0, 2.0]), step=2)
        trackers.log_text("sample", "def f(): ...", step=2)
        trackers.log_summary({"step": 2})
    runs = trackio.Api().runs(project)
    (run,) = list(runs)
    assert run.name == "my-run"
    assert (run.config["model"], run.config["_Group"]) == ({"num_layers": 2}, "g")
    rows = read_rows(project)
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 2]
    assert "2.5" in str(rows[0]["metrics"])
    assert capsys.readouterr().out == ""


def test_a_resumed_run_goes_on_and_a_fresh_one_does_not(project, tmp_path):
    for resume_step in (0, 2, 0):
        with contextlib.closing(open_run(project, tmp_path, resume_step=resume_step, name="n")) as trackers:
            trackers.log({"train/loss": 1.0}, step=resume_step + 1)
    ids = [row["run_id"] for row in read_rows(project)]
    assert ids[0] == ids[1] != ids[2]
    assert {row["run_name"] for row in read_rows(project)} == {"n"}


def test_artifacts_are_kept(project, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}")
    with contextlib.closing(open_run(project, tmp_path)) as trackers:
        trackers.log_artifact("config", tmp_path / "config.yaml", type="config")
        trackers.log({"x": 1.0}, step=1)
    path = trackio.utils.project_artifacts_dir(project)
    assert b"model: {}" in [file.read_bytes() for file in path.rglob("*") if file.is_file()]


def test_a_space_is_named_to_trackio(monkeypatch, tmp_path):
    def init(project: str, **options: Any) -> Any:
        raise ValueError(f"no {options['space_id']} in {project}")

    monkeypatch.setattr(trackio, "init", init)
    with pytest.raises(UserError, match="no me/space in p"):
        open_trackers([TrackioConfig(project="p", space_id="me/space")], run_dir=tmp_path, run_id="r")
