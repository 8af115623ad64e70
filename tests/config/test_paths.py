"""One rule for all paths: `~` is the home, variables are refused with what to write, and nothing makes a `~`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.core.bucket import storage_path
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.core.files import local_path
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.rungs import run_folder
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import read_log_directory, run_start_directory
from lm_trainer.trackers.base import TrackedRun
from lm_trainer.trackers.tensorboard import TensorboardConfig
from tests.config.test_urls import SOME, Key
from tests.conftest import Lmt, refused
from tests.test_project import dotted, name_of, nodes, python_files


@pytest.fixture
def home(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of the user, beside the working directory."""
    home = in_tmp_path.parent / f"{in_tmp_path.name}-home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.mark.parametrize("value", ["${SCRATCH}/x", "/a/$USER"])
@pytest.mark.parametrize(("root", "key"), SOME.values(), ids=[f"{c.__name__}.{n}" for c, n in SOME])
def test_a_variable_is_refused_where_it_is_written(root: Any, key: Key, value: str, in_tmp_path: Path) -> None:
    file = in_tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(key.document(value)))
    with pytest.raises(ConfigError) as raised:
        load(file, [], root)
    line = next(text for text in raised.value.problems if value in text)
    assert line.startswith(f"{file}:")
    assert (
        "is not replaced by the value of a variable; write the path itself, or set the key on the command line" in line
    )


@pytest.mark.parametrize(
    "section",
    [
        {"model": {"type": "custom", "factory": "${SCRATCH}/x.py:make"}},
        {"model": {"type": "custom", "family": "gpt2", "mlp": "~nobody-of-this-name/x.py:make"}},
        {"data": {"source": {"type": "grain", "factory": "/a/$USER.py:make"}}},
    ],
)
def test_files_of_code_have_the_same_rule(section: Any, in_tmp_path: Path) -> None:
    file = in_tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(section))
    with pytest.raises(ConfigError, match=r"is not replaced by the value of a variable|there is no home of"):
        load(file, [], RunConfig)


def test_a_home_that_there_is_not_is_refused(in_tmp_path: Path) -> None:
    for refuse in (local_path, lambda path: RunConfig.model_validate({"trainer": {"log_dir": path}})):
        with pytest.raises(
            (UserError, ValueError), match=r"~nobody-here/x: there is no home of ~nobody-here; .* \./~nobody"
        ):
            refuse("~nobody-here/x")
    assert local_path("./~nobody-here/x") == Path("~nobody-here/x")


def test_paths_are_expanded_where_they_are_used_and_stay_as_they_were_written(home: Path) -> None:
    config = RunConfig.model_validate({"trainer": {"log_dir": "~/l", "checkpointer": {"base_path": "~/c"}}})
    assert config.trainer.log_dir == "~/l"
    assert config.trainer.checkpointer.expanded_path("run") == str(home / "c" / "run")
    assert storage_path("~/c") == home / "c"
    assert local_path("~") == home
    assert TensorboardConfig(logdir="~/b/").directory(TrackedRun(Path("logs/run"), "run", 0)) == str(home / "b" / "run")
    assert run_start_directory(home / "l" / "run", "~/l") == Path.cwd()
    Path("my.yaml").write_text("trainer: {log_dir: ~/l}")
    assert read_log_directory(Path("my.yaml")) == home / "l"


def test_the_directory_of_a_ladder(home: Path) -> None:
    file = Path(__file__).parents[2] / "configs" / "ladder_nano.yaml"
    ladder = load(file, ["dir=~/ladder"], ModelLadder).config
    assert run_folder(ladder, ladder.sizes[0]).parent == home / "ladder"


@pytest.mark.slow
def test_no_run_makes_a_directory_called_tilde(lmt: Lmt, home: Path, in_tmp_path: Path) -> None:
    records = [json.dumps({"text": f"{n} squared is {n * n}"}) for n in range(100)]
    (home / "docs.jsonl").write_text("\n".join(records))
    config = {
        "model": {"type": "gpt2", "seq_len": 16, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
        "data": {"tokenizer": "bytes", "num_workers": 0, "train_urls": ["~/docs.jsonl"], "cache_dir": "~/cache"},
        "trainer": {
            "id": "run",
            "train_batch_size": 8,
            "num_train_steps": 1,
            "max_devices": 1,
            "sample_tokens": 0,
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "log_dir": "~/l",
            "tracker": [{"type": "tensorboard", "logdir": "~/boards"}, {"type": "jsonl", "path": "~/copies"}],
            "jax_compilation_cache_dir": "~/compiled",
            "checkpointer": {"base_path": "~/c"},
        },
        "hf_save_path": "~/hf",
    }
    (home / "base.yaml").write_text(json.dumps(config))
    done = lmt("train", "~/base.yaml")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in in_tmp_path.iterdir()] == []
    for created in (
        "l/run/run.json",
        "c/run/1",
        "boards/run",
        "copies/run/metrics.jsonl",
        "cache/train",
        "hf/run/step-1",
    ):
        assert (home / created).exists(), created
    assert "~/" not in done.stdout
    from_it = lmt("train", "~/base.yaml", "trainer.id=next", "trainer.initialize_from=~/c/run/1", "trainer.log_dir=~/l")
    assert from_it.returncode == 0, from_it.stderr
    listed = lmt("runs", "~/l").stdout
    assert "run" in listed
    assert "next" in listed
    assert lmt("export-hf", "~/c/run", "~/exported").returncode == 0
    assert (home / "exported" / "config.json").is_file()
    assert [path.name for path in in_tmp_path.iterdir()] == []


def test_arguments_have_the_same_rule(lmt: Lmt, home: Path) -> None:
    (home / "c.yaml").write_text("model: !include ~/model.yaml")
    (home / "model.yaml").write_text("type: gpt2")
    assert lmt("config", "show", "~/c.yaml").returncode == 0
    assert lmt("config", "schema", "--output=~/schema.json").returncode == 0
    assert (home / "schema.json").is_file()
    refused(lmt("config", "show", "${HOME}/c.yaml"), "${HOME}/c.yaml: ${HOME} is not replaced")
    refused(lmt("config", "check", "~/c.yaml", "data.train_urls=['$HOME/x.jsonl']"), "$HOME is not replaced")
    (home / "c.yaml").write_text("model: !include $HOME/model.yaml")
    refused(lmt("config", "show", "~/c.yaml"), "$HOME is not replaced")


def test_homes_are_looked_up_in_one_place_alone() -> None:
    callers = {
        name_of(path)
        for path in python_files("lm_trainer", "cli")
        for node in nodes(path)
        if dotted(node).endswith("expanduser")  # pyright: ignore[reportArgumentType]
    }
    assert callers == {"lm_trainer/core/files.py"}
