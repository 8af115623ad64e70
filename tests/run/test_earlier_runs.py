"""Runs that are older than some keys: they go on with what those keys meant before they were there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.run.config.gather import LARGE_MODEL_PARAMS, resolve_gather, with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig, config_hash, numeric_identity
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.run.files.records import read_run_record, recorded_identity
from lm_trainer.run.weights.saved_model import read_config
from tests.conftest import Lmt
from tests.run.conftest import MakeConfig

KEYS = ("matrix_updates", "gather")
"""The newer keys."""


def make_old_run(path: Path, determinism: str = "elastic") -> None:
    """Makes the directory of a run as it was when there were no newer keys."""
    config = RunConfig.model_validate({"trainer": {"id": "run", "determinism": determinism}})
    with RunDirectory(config.trainer, config, "run"):
        make_older(path, determinism)


def make_older(path: Path, determinism: str = "elastic") -> None:
    record = json.loads((path / "logs/run/run.json").read_text())
    for key in KEYS:
        del record["identity"]["trainer"][key]
    record["identity"]["trainer"]["determinism"] = determinism
    (path / "logs/run/run.json").write_text(json.dumps(record))
    for file in (path / "logs/run/config.yaml", path / "checkpoints/run/config.yaml"):
        settings = yaml.safe_load(file.read_text())
        for key in KEYS:
            settings["trainer"].pop(key, None)
        settings["trainer"]["determinism"] = determinism
        file.write_text(yaml.safe_dump(settings))


def resumed_config(**trainer: Any) -> RunConfig:
    """The configuration with which the run goes on."""
    config = RunConfig.model_validate({"trainer": {"id": "run", **trainer}})
    directory: Any = RunDirectory(config.trainer, config, "run")
    directory.restore_recorded_keys()
    with directory:
        return directory.config


@pytest.mark.parametrize(
    ("determinism", "expected"),
    [
        ("elastic", {"matrix_updates": "repeated", "gather": "model", "determinism": "elastic"}),
        ("layerwise", {"matrix_updates": "owned", "gather": "layer", "determinism": "elastic"}),
        ("fast", {"matrix_updates": "repeated", "gather": "auto", "determinism": "fast"}),
    ],
)
def test_a_run_without_newer_keys_goes_on_as_it_was_begun(
    in_tmp_path: Path, determinism: str, expected: dict[str, str]
) -> None:
    make_old_run(in_tmp_path, determinism)
    run = in_tmp_path / "logs" / "run"

    def values(trainer: Any) -> dict[str, str]:
        return {key: trainer[key] if isinstance(trainer, dict) else getattr(trainer, key) for key in expected}

    assert values(read_config(in_tmp_path / "checkpoints" / "run").trainer) == expected
    assert values(recorded_identity(read_run_record(run), run)["trainer"]) == expected
    # Written down with the first attempt, and kept by the next one, however the configuration spells it.
    for spelling in (determinism, "fast" if determinism == "fast" else "elastic"):
        assert values(resumed_config(determinism=spelling).trainer) == expected
        assert values(json.loads((run / "run.json").read_text())["identity"]["trainer"]) == expected


def test_another_value_than_that_of_then_is_a_change(in_tmp_path: Path) -> None:
    make_old_run(in_tmp_path)
    with pytest.raises(UserError, match=r'trainer.matrix_updates: was "repeated", now "owned"'):
        resumed_config(matrix_updates="owned")


def test_a_new_run_has_the_values_of_now(in_tmp_path: Path) -> None:
    for _ in range(2):
        trainer = resumed_config().trainer
        assert (trainer.matrix_updates, trainer.gather) == ("owned", "auto")


def test_newer_keys_leave_the_id_of_a_run_as_it_was() -> None:
    plain = RunConfig()
    assert config_hash(plain) == "b87b605c"
    assert set(KEYS) <= numeric_identity(plain)["trainer"].keys()
    layerwise = RunConfig.model_validate({"trainer": {"determinism": "layerwise"}})
    assert config_hash(layerwise) == "fb2b1020"
    assert config_hash(RunConfig.model_validate({"trainer": {"gather": "layer"}})) == config_hash(layerwise)
    for change in ({"matrix_updates": "repeated"}, {"gather": "model"}):
        assert config_hash(RunConfig.model_validate({"trainer": change})) not in (
            config_hash(plain),
            config_hash(layerwise),
        )


def test_a_newer_key_of_an_optimizer_leaves_the_id_of_a_run_as_it_was() -> None:
    assert config_hash(RunConfig.model_validate({"optimizer": {"type": "muon"}})) == "03a13b4b"
    limited = RunConfig.model_validate({"optimizer": {"type": "muon", "qk_clip": 100}})
    assert config_hash(limited) != "03a13b4b"


@pytest.mark.parametrize(("family", "expected"), [("mixtral", "128f0a67"), ("qwen3_moe", "bb7490d4")])
def test_newer_settings_of_a_family_leave_the_id_of_a_run_as_it_was(family: str, expected: str) -> None:
    assert config_hash(RunConfig.model_validate({"model": {"type": family}})) == expected
    for change in ({"expert_kernel": "grouped"}, {"lbl_over": "batch"}, {"selection_bias_rate": 0.0}):
        assert config_hash(RunConfig.model_validate({"model": {"type": family, **change}})) != expected
    written = RunConfig.model_validate({"model": {"type": family, "lbl_over": "microbatch"}})
    assert config_hash(written) == expected, "as it was when this was the default"


def resumed_experts(**model: Any) -> Any:
    config = RunConfig.model_validate({"model": {"type": "mixtral", **model}, "trainer": {"id": "run"}})
    directory: Any = RunDirectory(config.trainer, config, "run")
    directory.restore_recorded_keys()
    with directory:
        return directory.config.model


@pytest.mark.parametrize("recorded", [None, "microbatch"])
def test_experts_that_were_balanced_over_microbatches_stay_so(in_tmp_path: Path, recorded: str | None) -> None:
    assert resumed_experts().lbl_over == "batch"
    record = json.loads((in_tmp_path / "logs/run/run.json").read_text())
    settings = yaml.safe_load((in_tmp_path / "checkpoints/run/config.yaml").read_text())
    for model in (record["identity"]["model"], settings["model"]):
        del model["lbl_over"]
        model.update({} if recorded is None else {"lbl_over": recorded})
    (in_tmp_path / "logs/run/run.json").write_text(json.dumps(record))
    (in_tmp_path / "checkpoints/run/config.yaml").write_text(yaml.safe_dump(settings))
    assert read_config(in_tmp_path / "checkpoints/run").model.lbl_over == "microbatch"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r'model.lbl_over: was "microbatch", now "batch"'):
        resumed_experts(lbl_over="batch")
    for _ in range(2):
        assert resumed_experts().lbl_over == "microbatch"


def test_the_former_spelling_is_read_and_said_once(in_tmp_path: Path) -> None:
    file = in_tmp_path / "run.yaml"
    file.write_text("trainer:\n  determinism: layerwise\n")
    for loaded in (load(file, [], RunConfig), load(file, ["trainer.determinism=layerwise"], RunConfig)):
        assert (loaded.config.trainer.determinism, loaded.config.trainer.gather) == ("elastic", "layer")
        assert "layerwise is read as gather: layer" in "".join(loaded.notes)
    (note,) = load(file, [], RunConfig).notes
    assert note == f"{file}:2:3: trainer.determinism layerwise is read as gather: layer"
    with pytest.raises(ValueError, match="is a former spelling of gather: layer, but gather is model"):
        TrainerConfig.model_validate({"determinism": "layerwise", "gather": "model"})


def test_what_is_gathered_follows_from_the_size_of_the_model() -> None:
    def gathered(num_params: int, *, layers: bool = True, **trainer: Any) -> str:
        return resolve_gather(TrainerConfig.model_validate(trainer), num_params, layers=layers).gather

    assert gathered(LARGE_MODEL_PARAMS - 1) == "model"
    assert gathered(LARGE_MODEL_PARAMS) == "layer"
    assert gathered(LARGE_MODEL_PARAMS, layers=False) == "model"
    assert gathered(LARGE_MODEL_PARAMS, pipeline_axis_size=2, per_device_parallelism=2) == "model"
    assert gathered(LARGE_MODEL_PARAMS, determinism="fast") == "auto"
    assert gathered(1, gather="layer") == "layer"
    assert gathered(LARGE_MODEL_PARAMS, gather="model") == "model"
    assert (
        with_resolved_gather(RunConfig.model_validate({"model": {"type": "gpt2"}}), 50257).trainer.gather == "layer"
    )  # 124 M
    with pytest.raises(RuntimeError):
        _ = TrainerConfig().gathers_layers


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

    undisturbed = fingerprint("run", "trainer.matrix_updates=repeated")
    shutil.rmtree(in_tmp_path / "checkpoints/run/4")
    make_older(in_tmp_path)
    assert fingerprint("run") == undisturbed
    make_older(in_tmp_path)
    assert lmt("verify", "run").returncode == 0
    assert fingerprint("other") != undisturbed
