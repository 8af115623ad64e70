"""`lmt runs`, the places where runs are looked for, and what a start leaves that failed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.run.files.find_run import find_checkpoints, find_log_directories, find_run
from lm_trainer.run.files.listing import list_runs
from lm_trainer.run.trainer import Trainer
from tests.conftest import Lmt
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(path: Path, *, logged: int = 0, summary: int | None = None, changed: float = 1e9) -> Path:
    """A run directory of 100 steps as `lmt train` leaves it, with a checkpoint of 1000 bytes."""
    checkpoints = path.parent.parent / "checkpoints" / path.name
    for directory in (path, checkpoints / "1"):
        directory.mkdir(parents=True)
    (checkpoints / "1/array").write_bytes(bytes(1000))
    (path / "run.json").write_text(json.dumps({"id": path.name, "checkpoints": str(checkpoints)}))
    (path / "config.yaml").write_text("trainer: {num_train_steps: 100}\n")
    lines = [{"step": step, "train/loss": 9 - step / 100} for step in range(1, logged + 1)]
    lines += [{"step": logged, "fingerprint": "x"}] if logged else []
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    if summary is not None:
        (path / "summary.json").write_text(json.dumps({"step": summary}))
    for file in path.iterdir():
        os.utime(file, (changed, changed))
    return path


def test_what_is_told_of_a_run() -> None:
    path = make_run(Path("logs/a"), logged=40)
    (run,) = list_runs([Path("logs")])
    assert (run.id, run.state, run.step, run.steps, run.changed) == ("a", "stopped", 40, 100, 1e9)
    assert run.loss == pytest.approx(8.6)
    assert run.bytes == 1000 + sum(file.stat().st_size for file in path.iterdir())


def test_states() -> None:
    make_run(Path("logs/new"), changed=5)
    make_run(Path("logs/done"), logged=100, summary=100, changed=4)
    # A run that went on with more steps after its end, and stopped.
    make_run(Path("logs/again"), logged=70, summary=50, changed=3)
    assert [(run.id, run.state) for run in list_runs([Path("logs")])] == [
        ("new", "not begun"),
        ("done", "done"),
        ("again", "stopped"),
    ]


def test_a_run_that_goes_on_and_is_done() -> None:
    states = []
    with Trainer(settings(), OPTIMIZER, loss) as trainer:
        trainer.add_hook(lambda _: states.append(list_runs([Path("logs")])[0].state))
        trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))
    assert {*states} == {"running"}
    (run,) = list_runs([Path("logs")])
    assert (run.state, run.step) == ("done", run.steps)


def test_runs_are_found_where_configurations_say() -> None:
    Path("configs").mkdir()
    Path("my.yaml").write_text("trainer: {log_dir: elsewhere/logs}\n")
    Path("configs/other.yaml").write_text("trainer: {log_dir: third}\n")
    Path("broken.yaml").write_text("a: [\n")
    Path("list.yaml").write_text("- 1\n")
    assert find_log_directories() == [Path("logs"), Path("elsewhere/logs"), Path("third")]
    path = make_run(Path("elsewhere/logs/b"))
    assert find_run("b") == path.absolute()
    assert find_checkpoints("b") == (Path("elsewhere/checkpoints/b"), None)
    with pytest.raises(UserError, match="runs here: b"):
        find_run("c")


def test_the_command(lmt: Lmt, tmp_path: Path) -> None:
    make_run(tmp_path / "logs/a", logged=40)
    make_run(tmp_path / "elsewhere/b")
    (tmp_path / "my.yaml").write_text("trainer: {log_dir: elsewhere}\n")
    done = lmt("runs")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["run", "state", "step", "loss"],
        ["a", "stopped", "40/100", "8.6000"],
        ["elsewhere/b", "not", "begun", "0/100"],
    ]
    done = lmt("runs", "my.yaml", "--json")
    (run,) = json.loads(done.stdout)
    assert (run["id"], run["state"], run["loss"]) == ("b", "not begun", None)
    assert lmt("runs", "elsewhere/b").stdout.count("elsewhere/b") == 1
    assert lmt("runs", "nowhere").returncode == 2
    (tmp_path / "empty").mkdir()
    assert lmt("runs", "empty").stdout == "no runs in empty\n"


def fail_at_the_start(look: Callable[[], object] = lambda: None) -> None:
    """Fails before the first step, after a look at what is there by then."""
    with Trainer(settings(), OPTIMIZER, loss):
        look()
        raise UserError("no data")


class TestAStartThatFails:
    def start(self) -> None:
        def fail(_: Any) -> None:
            raise UserError("in a hook")

        with Trainer(settings(), OPTIMIZER, loss) as trainer:
            trainer.add_hook(fail)
            trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))

    def test_it_leaves_nothing(self) -> None:
        existing_files: list[Path] = []
        with pytest.raises(UserError, match="no data"):
            fail_at_the_start(
                lambda: existing_files.extend([*Path().glob("logs/own/run.json"), *Path().glob("checkpoints/own")])
            )
        assert len(existing_files) == 2
        assert not list(Path().iterdir())

    def test_directories_that_were_there_stay(self) -> None:
        Path("logs").mkdir()
        Path("checkpoints/other").mkdir(parents=True)
        with pytest.raises(UserError):
            fail_at_the_start()
        assert sorted(map(str, Path().glob("*/*"))) == ["checkpoints/other"]
        assert Path("logs").is_dir()

    def test_a_file_of_somebody_else_stays_with_the_rest(self) -> None:
        with pytest.raises(UserError):
            fail_at_the_start(Path("logs/own/notes.txt").touch)
        assert Path("logs/own/run.json").exists()
        assert Path("checkpoints/own").is_dir()

    def test_a_run_that_has_begun_stays(self) -> None:
        with pytest.raises(UserError, match="in a hook"):
            self.start()
        assert Path("logs/own/env.json").exists()
        # And so it does when it fails again, before its next step.
        with pytest.raises(UserError, match="no data"):
            fail_at_the_start()
        assert Path("logs/own/env.json").exists()
