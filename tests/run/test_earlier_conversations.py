"""Runs on conversations from the time when documents longer than a row were always split: they continue so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.core.errors import UserError
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.run.files.directory import RunDirectory
from lm_trainer.run.weights.saved_model import read_config
from tests.conftest import Lmt
from tests.run.conftest import MakeConfig

FORMAT: dict[str, Any] = {"type": "chat"}
NEWER = ("on_too_long", "last_turn_only", "turn_mask_field")


def make_config(*, mixture: bool, **format: Any) -> RunConfig:
    text = {"train_urls": ["a.jsonl"]}
    chats = {**text, "format": {**FORMAT, **format}}
    sets = {"configs": {"chats": chats, "web": text}, "train_weights": {"chats": 1, "web": 1}}
    data = {"tokenizer": "bytes", **(sets if mixture else chats)}
    return RunConfig.model_validate({"data": data, "trainer": {"id": "run"}})


def resume(config: RunConfig) -> RunConfig:
    directory: Any = RunDirectory(config.trainer, config, "run")
    directory.restore_recorded_keys()
    with directory:
        return directory.config


def treatment(config: RunConfig) -> str:
    return config.data.too_long_of("chats" if config.data.configs else "train")


def make_older(path: Path) -> None:
    """Removes the newer keys from the records of a run."""

    def remove(data: dict[str, Any]) -> None:
        format = (data["configs"]["chats"] if data["configs"] else data)["format"]
        for key in NEWER:
            del format[key]

    record = json.loads((path / "logs/run/run.json").read_text())
    remove(record["identity"]["data"])
    (path / "logs/run/run.json").write_text(json.dumps(record))
    for file in (path / "logs/run/config.yaml", path / "checkpoints/run/config.yaml"):
        settings = yaml.safe_load(file.read_text())
        remove(settings["data"])
        file.write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize("mixture", [False, True])
def test_they_split_long_documents(in_tmp_path: Path, mixture: bool) -> None:
    assert treatment(resume(make_config(mixture=mixture))) == "skip"
    make_older(in_tmp_path)
    assert treatment(read_config(Path("checkpoints/run"))) == "split"
    with pytest.raises(UserError, match=r'on_too_long: was "split", now "right"'):
        resume(make_config(mixture=mixture, on_too_long="right"))
    assert treatment(resume(make_config(mixture=mixture))) == "split"
    assert treatment(resume(make_config(mixture=mixture))) == "split"


@pytest.mark.slow
def test_they_are_resumed_with_their_rows(make_config: MakeConfig, in_tmp_path: Path, lmt: Lmt) -> None:
    """Not only the record: what is trained on is split as well."""
    rows = ({"prompt": f"{n}" * 30, "response": f" {n * n}" * (9 if n % 3 else 40)} for n in range(10, 90))
    (in_tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(
        data={"train_urls": ["rows.jsonl"], "validation_urls": [], "format": {"type": "supervised"}},
        trainer={"num_train_steps": 4, "max_devices": 1, "checkpointer": {"keep": [{"every": 2}]}},
    )

    def fingerprint(*settings: str) -> str:
        result = lmt("train", str(config), *settings)
        assert result.returncode == 0, result.stderr
        lines = (in_tmp_path / "logs/run/metrics.jsonl").read_text()
        return re.findall(r'"fingerprint": "(\w+)"', lines)[-1]

    undisturbed = fingerprint("data.format.on_too_long=split")
    shutil.rmtree(in_tmp_path / "checkpoints/run/4")
    record = json.loads((in_tmp_path / "logs/run/run.json").read_text())
    del record["identity"]["data"]["format"]["on_too_long"]
    (in_tmp_path / "logs/run/run.json").write_text(json.dumps(record))
    assert fingerprint() == undisturbed


def test_a_new_run_records_the_treatment(in_tmp_path: Path) -> None:
    assert treatment(resume(make_config(mixture=False, on_too_long="right"))) == "right"
    assert treatment(resume(make_config(mixture=False))) == "right"
    assert treatment(read_config(Path("checkpoints/run"))) == "right"


def test_their_names_are_found() -> None:
    # The name of a run without an ID has the hash of its configuration. The numbers are from before the change.
    def hash_of(format: dict[str, Any]) -> str:
        data = {"train_urls": ["a.jsonl"], "tokenizer": "bytes", "format": format}
        return config_hash(RunConfig.model_validate({"data": data, "model": {"type": "llama"}}))

    assert hash_of({"type": "chat"}) == "dd42e56d"
    assert hash_of({"type": "supervised"}) == "28778fff"
    assert hash_of({"type": "chat", "on_too_long": "right"}) != "dd42e56d"
