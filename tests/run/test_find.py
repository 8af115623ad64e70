"""Discovery of runs and their checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.run.files.find_run import find_checkpoints, find_checkpoints_of_run, find_log_directories, find_run
from tests.conftest import Lmt


@pytest.fixture
def run(in_tmp_path: Path) -> Path:
    """The directory of a run with one checkpoint, below the working directory."""
    logs, checkpoints = in_tmp_path / "logs" / "a", in_tmp_path / "checkpoints" / "a"
    (checkpoints / "10").mkdir(parents=True)
    logs.mkdir(parents=True)
    (logs / "run.json").write_text(json.dumps({"id": "a", "checkpoints": str(checkpoints)}))
    for directory in (logs, checkpoints):
        (directory / "config.yaml").write_text("{}")
    return logs


@pytest.mark.parametrize("name", ["a", "logs/a", "checkpoints/a"])
def test_checkpoints_are_found_by_id_and_by_either_directory(run: Path, in_tmp_path: Path, name: str) -> None:
    directory, step = find_checkpoints(name)
    assert isinstance(directory, Path)
    assert (directory.absolute(), step) == (in_tmp_path / "checkpoints" / "a", None)


def test_a_step_can_be_named(run: Path) -> None:
    assert find_checkpoints("checkpoints/a/10") == (Path("checkpoints/a"), 10)


@pytest.mark.parametrize("name", ["a", "logs/a"])
def test_a_run_is_found_by_id_and_by_directory(run: Path, name: str) -> None:
    assert find_run(name) == run


def test_a_checkpoint_directory_is_no_run(run: Path) -> None:
    with pytest.raises(UserError, match="checkpoints/a is a checkpoint directory; name the run directory"):
        find_run("checkpoints/a")


def test_a_name_that_nothing_has_is_answered_with_those_that_there_are(run: Path) -> None:
    for find in (find_run, find_checkpoints):
        with pytest.raises(UserError, match=r"b: no run of this name.*; runs here: a"):
            find("b")


def test_a_model_in_hugging_face_layout_is_no_run(in_tmp_path: Path) -> None:
    (in_tmp_path / "model").mkdir()
    (in_tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"^loss\.reference: model is a model in .*: lmt import-hf model checkpoints/NAME"
    ):
        find_checkpoints("model", "loss.reference")


def test_a_run_that_was_moved_as_a_whole_keeps_its_checkpoints(run: Path, in_tmp_path: Path) -> None:
    moved = in_tmp_path / "moved"
    moved.mkdir()
    for name in ("logs", "checkpoints"):
        shutil.move(in_tmp_path / name, moved / name)
    assert find_checkpoints_of_run(moved / "logs" / "a") == moved / "checkpoints" / "a"


INVALID_CONFIGS = {
    "a date that there is not": b"log_dir: 2024-02-30",
    "a tag that does not fit": b"trainer: {log_dir: !!timestamp foo}",
    "an empty number": b'trainer: {log_dir: !!int ""}',
    "a tag of Python": b"log_dir: !!python/object/apply:os.abort []",
    "an include of something that is not there": b"trainer: !include gone.yaml",
    "an include of itself": b"trainer: !include other.yaml",
    "an alias in itself": b"trainer: &a {log_dir: *a}",
    "a list": b"- log_dir",
    "two documents": b"log_dir: a\n---\nlog_dir: b",
    "no text": b"\xff\xfelog_dir\x00",
    "a number": b"trainer: {log_dir: 7}",
    "a path that there cannot be": b'trainer: {log_dir: "a\\0b"}',
    "a variable": b"trainer: {log_dir: '${HOME}/logs'}",
    "the home of nobody": b"trainer: {log_dir: ~nobody-here/logs}",
    "a URL": b"trainer: {log_dir: s3://b/logs}",
    "nested deeply": b"log_dir: " + b"[" * 5000,
}


@pytest.mark.parametrize("content", INVALID_CONFIGS.values(), ids=INVALID_CONFIGS)
def test_other_files_of_the_working_directory_do_no_harm(
    run: Path, in_tmp_path: Path, lmt: Lmt, content: bytes
) -> None:
    (in_tmp_path / "configs").mkdir()
    for file in ("other.yaml", "configs/other.yml"):
        (in_tmp_path / file).write_bytes(content)
    (in_tmp_path / "directory.yaml").mkdir()
    os.mkfifo(in_tmp_path / "pipe.yaml")
    assert find_log_directories() == [Path("logs")]
    assert find_run("a") == run
    listed = lmt("runs")
    assert (listed.returncode, listed.stderr) == (0, "")
    checked = lmt("config", "check", "other.yaml")
    assert checked.returncode == 2
    assert "Traceback" not in checked.stderr


def test_directories_of_runs_are_named_by_includes_and_merges_too(in_tmp_path: Path) -> None:
    (in_tmp_path / "a.yaml").write_text("trainer: !include parts/trainer.yaml")
    (in_tmp_path / "parts").mkdir()
    (in_tmp_path / "parts" / "trainer.yaml").write_text("log_dir: by-include")
    (in_tmp_path / "b.yaml").write_text("data: &d {log_dir: by-merge}\ntrainer: {<<: *d}")
    assert find_log_directories() == [Path("logs"), Path("by-include"), Path("by-merge")]
