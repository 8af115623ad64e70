"""The `tracker:` section as users write it: errors at the line, and the default type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_trainer.config.loader import load
from lm_trainer.core.config import Config
from lm_trainer.core.errors import ConfigError
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.saved_model import read_config
from lm_trainer.trackers import AnyTracker, TensorboardConfig, TrackioConfig, WandbConfig


class Trainer(Config):
    tracker: AnyTracker | tuple[AnyTracker, ...] = (TensorboardConfig(),)


class Root(Config):
    trainer: Trainer = Trainer()


@pytest.fixture
def without_packages(monkeypatch) -> None:
    monkeypatch.setattr("lm_trainer.trackers.base.find_spec", lambda _: None)


def trackers(directory: Path, text: str, *overrides: str, root: Any = Root) -> Any:
    (directory / "run.yaml").write_text(text)
    return load(directory / "run.yaml", overrides, root).config.trainer.tracker


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trainer:\n  tracker:\n    type: wandb\n    project: p\n", "3:11: trainer.tracker: the package wandb"),
        ("trainer:\n  tracker:\n  - type: noop\n  - type: trackio\n", "4:11: trainer.tracker.1: the package trackio"),
    ],
)
def test_a_missing_package_is_said_at_its_line(in_tmp_path, without_packages, text, line):
    with pytest.raises(ConfigError) as caught:
        trackers(in_tmp_path, text, root=RunConfig)
    assert f"run.yaml:{line} is not installed; run `pip install" in str(caught.value)


def test_a_run_is_read_where_its_tracker_is_not_installed(in_tmp_path, without_packages):
    (in_tmp_path / "config.yaml").write_text("trainer: {id: x, tracker: {type: wandb, project: p}}")
    assert read_config(in_tmp_path).trainer.id == "x"


def test_a_block_without_type_is_wandb_and_no_block_is_tensorboard(in_tmp_path):
    pytest.importorskip("wandb")
    assert trackers(in_tmp_path, "{}") == (TensorboardConfig(),)
    assert trackers(in_tmp_path, "trainer: {tracker: {project: p, entity: e}}") == WandbConfig(project="p", entity="e")
    assert trackers(in_tmp_path, "{}", "trainer.tracker.project=p") == WandbConfig(project="p")
    assert trackers(in_tmp_path, "trainer: {tracker: []}") == ()


def test_a_list_holds_several(in_tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    text = "trainer: {tracker: [{type: wandb, project: p}, {type: tensorboard, logdir: x}, {type: trackio}]}"
    several = (WandbConfig(project="p"), TensorboardConfig(logdir="x"), TrackioConfig())
    assert trackers(in_tmp_path, text) == several


def test_the_name_that_was_meant_is_suggested(in_tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml:1:\d+: .*unknown type 'json_logger'.* did you mean 'jsonl'"):
        trackers(in_tmp_path, "trainer: {tracker: {type: json_logger}}")
