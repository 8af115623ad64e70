"""Discovery of runs and their checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.run.find import checkpoints_of, find_checkpoints, find_run


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


def test_a_run_that_was_moved_as_a_whole_keeps_its_checkpoints(run: Path, in_tmp_path: Path) -> None:
    moved = in_tmp_path / "moved"
    moved.mkdir()
    for name in ("logs", "checkpoints"):
        shutil.move(in_tmp_path / name, moved / name)
    assert checkpoints_of(moved / "logs" / "a") == moved / "checkpoints" / "a"
