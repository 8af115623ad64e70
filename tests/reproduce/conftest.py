"""A tiny run, trained once, whose copies the tests of this folder verify, replay, compare and branch."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from tests.conftest import Outcome, lmt_environment, run_here
from tests.hf_model import hf_model  # noqa: F401
from tests.run.conftest import Plain, merge
from tests.warm_lmt import WarmLmt

STEPS = 6
TINY: Plain = {
    "model": {"type": "gpt2", "seq_len": 16, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "scan_layers": True},
    "data": {"tokenizer": "bytes", "num_workers": 0, "train_urls": ["text.txt"]},
    "trainer": {
        "id": "run",
        "train_batch_size": 8,
        "elastic_shards": 8,
        "num_train_steps": STEPS,
        "max_devices": 1,
        "sample_tokens": 0,
        "tracker": [],
        "watch": {"interval": 0},
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "checkpointer": {"save_interval": "1h", "keep": [{"every": 2}]},
    },
    "optimizer": {"learning_rate": 1e-2, "warmup": 0},
}


def write_config(directory: Path, **changes: Plain) -> Path:
    text = "\n".join(f"{n} squared is {n * n}, and its cube {n**3}." for n in range(400))
    (directory / "text.txt").write_text(text)
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(merge(TINY, changes)))
    return path


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Compiling for eight takes eight times as long, and shows nothing more in these tests."""
    with pytest.MonkeyPatch.context() as patch:
        every = jax.devices
        patch.setattr(jax, "devices", lambda *args: every(*args)[:1])
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the tiny run was started and has ended."""
    directory = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch, on_one_device():
        patch.chdir(directory)
        result = run_here("train", write_config(directory))
    assert result.returncode == 0, result.stderr
    return directory


@pytest.fixture
def copied(finished: Path, in_tmp_path: Path) -> Path:
    """A copy of it, in which the test runs."""
    return copy_run(finished, in_tmp_path)


@pytest.fixture(scope="session")
def finished_on_four(tmp_path_factory: pytest.TempPathFactory, warm_lmt: WarmLmt) -> Path:
    """The directory of a run with dropout on four devices, for tests that are marked `optimised`."""
    directory = tmp_path_factory.mktemp("four")
    config = write_config(directory, model={"resid_pdrop": 0.1}, trainer={"max_devices": None})
    environment = lmt_environment(devices=4)
    result = warm_lmt.run(["train", str(config)], cwd=directory, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return directory


@pytest.fixture
def copied_from_four(finished_on_four: Path, in_tmp_path: Path) -> Path:
    """A copy of it, in which the test runs."""
    return copy_run(finished_on_four, in_tmp_path)


def copy_run(source: Path, out: Path) -> Path:
    shutil.copytree(source, out, dirs_exist_ok=True)
    record = out / "logs/run/run.json"
    record.write_text(record.read_text().replace(str(source), str(out)))
    return out


def metrics(directory: Path, run: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "logs" / run / "metrics.jsonl").read_text().splitlines()]


def as_json(result: Outcome) -> Any:
    return json.loads(result.stdout)
