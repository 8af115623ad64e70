"""Things that an attacker would look for in the repository itself."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.config.config_node import ConfigNode, all_keys
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import Lmt
from tests.test_project import ROOT, dotted, name_of, nodes, python_files, tracked_files

# Put together, so that this file holds none of them.
SECRETS = re.compile(
    r"\bhf_[A-Za-z]{30,}\b"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{36}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\bxox[abp]-[0-9A-Za-z-]{20,}"
)
MADE_UP = {
    "token of a hub": "hf_" + "abcdefgh" * 4,
    "key of a cloud": "AKIA" + "ABCDEFGHIJKLMNOP",
    "token of a forge": "ghp_" + "a1B2" * 9,
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
}


@pytest.mark.parametrize("text", MADE_UP.values(), ids=MADE_UP)
def test_secrets_are_noticed(text: str) -> None:
    assert SECRETS.search(f"token = '{text}'")


def test_no_file_holds_a_secret() -> None:
    secrets = [
        f"{name_of(path)}: {match[0][:8]}..."
        for path in tracked_files()
        if (match := SECRETS.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert secrets == []


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))


PUBLISHING = {"publish": {"id-token": "write", "attestations": "write"}, "describe": {"contents": "write"}}


@pytest.mark.skipif(not workflows(), reason="an unpacked archive has no workflows")
def test_workflows_run_pinned_actions_with_the_least_rights() -> None:
    for path in workflows():
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, name_of(path)
        for name, job in workflow["jobs"].items():
            # A job that publishes may write what it publishes, where no other job runs.
            assert job.get("permissions", {}) == PUBLISHING.get(name, {}), f"{name_of(path)}: {name}"
            for step in job["steps"]:
                uses = step.get("uses", "")
                assert not uses or re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", uses), f"{name_of(path)}: {uses}"
                if uses.startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False
                # An expression inside a script is a way in for whoever names a branch.
                assert "${{" not in step.get("run", ""), f"{name_of(path)}: {step['run']}"


RUNS_SOMETHING = {
    "lm_trainer/__main__.py": "the command line",
    "lm_trainer/bench/start.py": "the same program, to time its start",
    "lm_trainer/checkpoint/event_loops.py": "uvloop, by its name",
    "lm_trainer/core/bucket_files.py": "s3fs, by its name",
    "lm_trainer/core/user_code.py": "the keys of RUNS_USER_CODE",
    "lm_trainer/data/sources/embedded.py": "modules of Python's library",
    "lm_trainer/health/alerts/sender.py": "trainer.alerts.command",
    "lm_trainer/health/power_off.py": "trainer.shutdown_at_exit",
    "lm_trainer/reproduce/bisect_code.py": "the code of a checkout, which `lmt bisect code --code` names",
    "lm_trainer/run/files/environment.py": "git",
    "lm_trainer/sweep/running.py": "the command line",
    "lm_trainer/trackers/wandb.py": "git",
}
"""Modules that start a program, or import what is not named in the code."""
RUNS_USER_CODE = {
    "lm_trainer/data/sources/grain_pipeline.py": ["data.source.factory"],
    "lm_trainer/models/custom.py": ["model.factory", "model.attention", "model.mlp"],
}
"""Modules that run a Python file that the configuration names, and the keys that name it."""


def starts_something(path: Path) -> bool:
    names = {dotted(node) for node in nodes(path) if isinstance(node, ast.Name | ast.Attribute)}
    return any(
        re.match(r"subprocess\.(run|Popen|call|check)|os\.(system|popen|exec|spawn|posix_spawn)", n) for n in names
    ) or (not names.isdisjoint({"importlib.import_module", "importlib.util.spec_from_file_location", "runpy.run_path"}))


def test_all_that_runs_code_is_known() -> None:
    """A key of a configuration that runs something stands in docs/explanation/what-runs-code.md."""
    starters = {name_of(path) for path in python_files("lm_trainer") if starts_something(path)}
    launchers = {name for name in starters if name.startswith("lm_trainer/launch/")}
    assert starters - launchers == {*RUNS_SOMETHING}
    page = (ROOT / "docs" / "explanation" / "what-runs-code.md").read_text()
    users = {
        name_of(path)
        for path in python_files("lm_trainer")
        if any(isinstance(node, ast.ImportFrom) and node.module == "lm_trainer.core.user_code" for node in nodes(path))
    }
    assert users == {*RUNS_USER_CODE}
    keys = {reason for reason in RUNS_SOMETHING.values() if re.fullmatch(r"(data|trainer)\.[\w.]+", reason)}
    keys |= {key for named in RUNS_USER_CODE.values() for key in named}
    assert len(keys) == 6
    assert all(f"`{key}`" in page for key in keys)


def test_the_page_names_keys_that_there_are() -> None:
    page = (ROOT / "docs" / "explanation" / "what-runs-code.md").read_text()
    known_keys = {*all_keys(ConfigNode.root(RunConfig), all_classes=True)}
    named = set(re.findall(r"`((?:data|model|trainer|eval_harness|hf)[\w]*\.[\w.]+|hf_\w+)`", page))
    assert len(named) > 10
    assert named <= known_keys


@pytest.mark.parametrize(
    "model",
    [
        {"type": "gpt2", "seq_len": 16, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
        {"type": "custom", "factory": "evil.py:make", "mlp": "evil.py:make", "seq_len": 16},
        {"type": "custom", "family": "gpt2", "attention": "evil.py:make", "seq_len": 16},
    ],
    ids=["family", "factory", "part"],
)
@pytest.mark.parametrize("command", ["config show", "config check", "config diff", "config plot"])
def test_reading_a_configuration_runs_nothing_of_it(
    lmt: Lmt, in_tmp_path: Path, command: str, model: dict[str, Any]
) -> None:
    (in_tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\ndef make(): ...\n")
    config = {
        "model": model,
        "data": {"tokenizer": "bytes", "source": {"type": "grain", "factory": "evil.py:make"}},
        "trainer": {"alerts": {"command": "touch ran"}, "train_batch_size": 8},
    }
    (in_tmp_path / "c.yaml").write_text(json.dumps(config))
    done = lmt(*command.split(), "c.yaml")
    assert done.returncode == 0, done.stderr
    assert not (in_tmp_path / "ran").exists()
