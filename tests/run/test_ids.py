"""Ids of runs from the environment are checked as those of the configuration are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import RunDirectory, choose_run_id
from tests.conftest import Lmt, refused

WRONG = ["../../x", "/x", "a/b", "..", ".", "a b", "-x", "x\n", "\x1b[31m", "${USER}", "~"]


@pytest.mark.parametrize("name", WRONG)
def test_both_doors_refuse_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_ID", name)
    with pytest.raises(UserError) as of_environment:
        choose_run_id(RunConfig(), "base")
    with pytest.raises(ValueError, match="cannot name a directory") as of_key:
        TrainerConfig(id=name)
    message = str(of_environment.value).removeprefix("RUN_ID in the environment: ")
    assert message in str(of_key.value)


def test_what_the_key_takes_the_environment_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "a.b-c_1", "7", "läuft"):
        monkeypatch.setenv("RUN_ID", name)
        assert choose_run_id(RunConfig(), "base") == TrainerConfig(id=name).id == name
    # The key wins, and one that is empty is none.
    assert choose_run_id(RunConfig(trainer=TrainerConfig(id="mine")), "base") == "mine"
    monkeypatch.setenv("RUN_ID", "")
    assert choose_run_id(RunConfig(), "base").startswith("base-")


def test_nothing_is_made_outside(lmt: Lmt, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working_directory = in_tmp_path / "a" / "b" / "c"
    working_directory.mkdir(parents=True)
    (working_directory / "base.yaml").write_text("{}")
    monkeypatch.chdir(working_directory)
    monkeypatch.setenv("RUN_ID", "../../x")
    files_before = sorted(in_tmp_path.rglob("*"))
    refused(lmt("train", "base.yaml"), "RUN_ID in the environment: '../../x' cannot name a directory")
    assert sorted(in_tmp_path.rglob("*")) == files_before


def test_the_cache_of_programs_has_the_same_rule_by_key_and_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hdfs://b/x", "gs:/b/x", "${SCRATCH}/x"):
        with pytest.raises(ValueError, match=r"is a URL|lost a slash|is not replaced"):
            TrainerConfig(jax_compilation_cache_dir=name)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "hdfs://b/x")
    with pytest.raises(UserError, match="JAX_COMPILATION_CACHE_DIR in the environment: hdfs://b/x is a URL"):
        configure_jax({}, None)


class _Settings(Config):
    trainer: TrainerConfig


def test_a_directory_that_is_written_in_two_ways_is_held_once(in_tmp_path: Path) -> None:
    trainer = TrainerConfig.model_validate({"log_dir": "runs", "checkpointer": {"base_path": "runs/../runs"}})
    with RunDirectory(trainer, _Settings(trainer=trainer), "a") as directory:
        assert directory.path.is_dir()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", ".config.yaml.tmp", "artifacts"])
def test_a_run_that_was_given_away_writes_to_no_other_file(in_tmp_path: Path, name: str) -> None:
    (in_tmp_path / "mine").write_text("mine")
    (in_tmp_path / "runs" / "a").mkdir(parents=True)
    (in_tmp_path / "runs" / "a" / name).symlink_to(in_tmp_path / "mine")
    trainer = TrainerConfig.model_validate({"log_dir": "runs", "checkpointer": {"base_path": "checkpoints"}})
    directory = RunDirectory(trainer, _Settings(trainer=trainer), "a")
    with pytest.raises(UserError, match=r"is a link to .*mine, outside its directory"):
        directory.__enter__()
    assert (in_tmp_path / "mine").read_text() == "mine"


def test_a_checkpoint_may_be_elsewhere(in_tmp_path: Path) -> None:
    (in_tmp_path / "archive").mkdir()
    (in_tmp_path / "checkpoints" / "a").mkdir(parents=True)
    (in_tmp_path / "checkpoints" / "a" / "10").symlink_to(in_tmp_path / "archive")
    trainer = TrainerConfig.model_validate({"log_dir": "runs", "checkpointer": {"base_path": "checkpoints"}})
    with RunDirectory(trainer, _Settings(trainer=trainer), "a") as directory:
        assert directory.checkpoints == in_tmp_path / "checkpoints" / "a"
