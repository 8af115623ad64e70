"""Runs that are older than some keys: they go on with what those keys meant before they were there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.core.errors import UserError
from lm_trainer.run.config import RunConfig, config_hash, numeric_identity
from lm_trainer.run.directory import RunDirectory
from lm_trainer.run.records import identity_of, read_run_record
from lm_trainer.run.saved_model import read_config
from tests.conftest import Lmt
from tests.run.conftest import MakeConfig

KEYS = ("matrix_updates",)
"""The newer keys."""


def begin(path: Path, **trainer: Any) -> None:
    """Makes the directory of a run as it was when there were no newer keys."""
    config = RunConfig.model_validate({"trainer": {"id": "run", **trainer}})
    with RunDirectory(config.trainer, config, "run"):
        make_older(path)


def make_older(path: Path) -> None:
    record = json.loads((path / "logs/run/run.json").read_text())
    for key in KEYS:
        del record["identity"]["trainer"][key]
    (path / "logs/run/run.json").write_text(json.dumps(record))
    for file in (path / "logs/run/config.yaml", path / "checkpoints/run/config.yaml"):
        settings = yaml.safe_load(file.read_text())
        for key in KEYS:
            settings["trainer"].pop(key, None)
        file.write_text(yaml.safe_dump(settings))


def go_on(**trainer: Any) -> RunConfig:
    """The configuration with which the run goes on."""
    config = RunConfig.model_validate({"trainer": {"id": "run", **trainer}})
    directory: Any = RunDirectory(config.trainer, config, "run")
    directory.go_on_as_begun()
    with directory:
        return directory.config


@pytest.mark.parametrize(("determinism", "updates"), [("elastic", "repeated"), ("layerwise", "owned")])
def test_a_run_without_newer_keys_goes_on_as_it_was_begun(in_tmp_path: Path, determinism: str, updates: str) -> None:
    begin(in_tmp_path, determinism=determinism)
    assert read_config(in_tmp_path / "checkpoints" / "run").trainer.matrix_updates == updates
    run = in_tmp_path / "logs" / "run"
    assert identity_of(read_run_record(run), run)["trainer"]["matrix_updates"] == updates
    # Written down with the first attempt, and kept by the next one.
    for _ in range(2):
        assert go_on(determinism=determinism).trainer.matrix_updates == updates
        record = json.loads((in_tmp_path / "logs/run/run.json").read_text())
        assert record["identity"]["trainer"]["matrix_updates"] == updates


def test_another_value_than_that_of_then_is_a_change(in_tmp_path: Path) -> None:
    begin(in_tmp_path)
    with pytest.raises(UserError, match=r'trainer.matrix_updates: was "repeated", now "owned"'):
        go_on(matrix_updates="owned")


def test_a_new_run_has_the_values_of_now(in_tmp_path: Path) -> None:
    for _ in range(2):
        assert go_on().trainer.matrix_updates == "owned"


def test_newer_keys_leave_the_id_of_a_run_as_it_was() -> None:
    plain = RunConfig()
    assert config_hash(plain) == "b87b605c"
    assert set(KEYS) <= numeric_identity(plain)["trainer"].keys()
    other = RunConfig.model_validate({"trainer": {"matrix_updates": "repeated"}})
    assert config_hash(other) != config_hash(plain)


@pytest.mark.slow
def test_an_older_run_is_resumed_with_its_bits(make_config: MakeConfig, in_tmp_path: Path, lmt: Lmt) -> None:
    config = make_config(
        optimizer={"type": "muon", "learning_rate": 1e-2},
        trainer={"num_train_steps": 4, "max_devices": 1, "checkpointer": {"keep": [{"every": 2}]}},
    )

    def fingerprint(run: str, *settings: str) -> str:
        assert lmt("train", str(config), f"trainer.id={run}", *settings).returncode == 0
        lines = (in_tmp_path / "logs" / run / "metrics.jsonl").read_text()
        return re.findall(r'"fingerprint": "(\w+)"', lines)[-1]

    whole = fingerprint("run", "trainer.matrix_updates=repeated")
    shutil.rmtree(in_tmp_path / "checkpoints/run/4")
    make_older(in_tmp_path)
    assert fingerprint("run") == whole
    make_older(in_tmp_path)
    assert lmt("verify", "run").returncode == 0
    assert fingerprint("other") != whole
