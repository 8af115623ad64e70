"""Records of a run that are cut short or missing: named with their remedy, and kept twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.files.listing import list_runs
from lm_trainer.run.files.records import read_attempts
from lm_trainer.run.trainer import Trainer
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings

RUN, COPY = Path("logs/own"), Path("checkpoints/own/run")
NAMES = ("run.json", "env.json")


def train(*, stop_at: int = 0, **changes: Any) -> None:
    with Trainer(settings(**changes), OPTIMIZER, loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        for info in trainer.training_steps(state, trainer.data_loader(Numbered())):
            if info.step == stop_at:
                return


def read_records() -> dict[str, Any]:
    """The content of the run's records, but for the place of the checkpoints."""
    contents = {name: json.loads((RUN / name).read_bytes()) for name in NAMES}
    contents["run.json"].pop("checkpoints")
    return contents


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was stopped after 3 steps of 6, with a checkpoint."""
    directory = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        train(stop_at=3)
    return directory


@pytest.fixture(autouse=True)
def _run_in_copy(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def damage(content: bytes, kind: str) -> bytes:
    if kind == "flipped":
        # A bit of the first brace or bracket.
        return bytes([content[0] ^ 1]) + content[1:]
    return {"empty": b"", "cut": content[: len(content) // 2], "zeros": bytes(len(content)), "other": b"3\n"}[kind]


def test_each_record_has_a_copy_beside_the_checkpoints() -> None:
    for name in NAMES:
        assert (COPY / name).read_bytes() == (RUN / name).read_bytes()


@pytest.mark.parametrize("kind", ["empty", "cut", "flipped", "zeros", "other"])
@pytest.mark.parametrize("name", NAMES)
def test_a_record_that_is_cut_short_is_named_with_its_remedy(name: str, kind: str) -> None:
    records_before = read_records()
    (RUN / name).write_bytes(damage((RUN / name).read_bytes(), kind))
    with pytest.raises(MachineError, match=rf"logs/own/{name} is damaged: .* remove the file and start the run again"):
        train()
    (RUN / name).unlink()
    with Trainer(settings(), OPTIMIZER, loss):
        assert read_records() == records_before


def test_one_damaged_record_does_not_hide_the_other_runs(caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(RUN, "logs/cut")
    Path("logs/cut/run.json").write_bytes(damage((RUN / "run.json").read_bytes(), "cut"))
    assert {run.id: run.state for run in list_runs([Path("logs")])} == {"own": "stopped", "cut": "damaged"}
    assert "logs/cut/run.json is damaged: it is not JSON" in caplog.text
    with pytest.raises(MachineError, match=r"logs/cut/run.json is damaged"):
        find_checkpoints("cut")


def test_a_missing_record_comes_back_from_its_copy_and_is_compared(capfd: pytest.CaptureFixture) -> None:
    records_before = read_records()
    shutil.rmtree(RUN)
    with pytest.raises(UserError, match=r"holds a run with another configuration:\n.*seed"):
        train(seed=7)
    train()
    records_after = read_records()
    assert records_after["run.json"] == records_before["run.json"]
    assert records_after["env.json"][:-1] == records_before["env.json"]
    assert [attempt["step"] for attempt in records_after["env.json"]] == [0, 3]
    output = " ".join(capfd.readouterr().out.split())
    for name in NAMES:
        assert f"{name} was missing, and is back from the copy beside the checkpoints" in output


def test_a_missing_record_without_a_copy_is_said(capfd: pytest.CaptureFixture) -> None:
    """As in a run of an older version, which kept no copies."""
    shutil.rmtree(COPY)
    (RUN / "run.json").unlink()
    (RUN / "env.json").unlink()
    train()
    output = " ".join(capfd.readouterr().out.split())
    assert "run.json is missing, and there is no copy: the configuration cannot be compared" in output
    assert "env.json is missing, and there is no copy: what computed the steps so far is not known" in output
    train()
    assert "is missing" not in capfd.readouterr().out


def test_a_copy_of_another_run_is_left_alone() -> None:
    content = json.loads((COPY / "run.json").read_text())
    (COPY / "run.json").write_text(json.dumps({**content, "id": "other"}))
    (RUN / "env.json").unlink()
    train()
    assert [attempt["step"] for attempt in read_attempts(RUN)] == [3]
