"""Metrics that are lost: on disk before their checkpoint is, named when they are missing, at the start and the end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.checkpoint.store import CheckpointStore, list_steps, read_record
from lm_trainer.core.errors import MachineError, Preempted
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.training.checkpoints import SERIES
from lm_trainer.trackers import JsonlConfig, read_metrics
from lm_trainer.trackers.series import Series, format_steps
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings

RUN, CHECKPOINTS, METRICS = Path("logs/own"), Path("checkpoints/own"), Path("logs/own/metrics.jsonl")


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(steps: int = 8, actions: dict[int, Callable[[], Any]] | None = None, **changes: Any) -> list[str]:
    """Trains with a permanent checkpoint every 3 steps; returns what the metrics lack at its start."""
    with Trainer(settings(num_train_steps=steps, **changes), OPTIMIZER, loss) as trainer:

        @trainer.add_hook
        def _(info: Any) -> None:
            (actions or {}).get(info.step, lambda: None)()

        trainer.add_eval_hook(Numbered())
        state = trainer.initial_state(model_init=Bigrams)
        trainer.train(state, trainer.data_loader(Numbered()))
        return [*trainer.tracker.gaps]


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def drop_lines(*steps: int) -> None:
    lines = METRICS.read_text().splitlines(keepends=True)
    METRICS.write_text("".join(line for line in lines if not any(f'"step": {step},' in line for step in steps)))


def logged_losses() -> list[int]:
    return [line["step"] for line in read_metrics(RUN) if "train/loss" in line]


@pytest.mark.slow
def test_a_checkpoint_knows_the_lines_that_were_there() -> None:
    with pytest.raises(Preempted):
        train(actions={5: stop})
    series = read_record(CHECKPOINTS, 6)[SERIES]
    lines = {"train/loss": [[1, 6, 1]], "eval/accuracy": [[4, 4, 1]], "fingerprint": [[3, 6, 3]]}
    assert series == {"metrics.jsonl": lines}
    assert train() == []
    assert logged_losses() == [*range(1, 9)]


def test_lines_are_on_disk_before_their_checkpoint_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut at the commit of a checkpoint takes no line of its steps."""
    on_disk: dict[int, int] = {}
    sync, save = os.fsync, CheckpointStore.save
    checked = []

    def fsync(fd: int) -> None:
        sync(fd)
        on_disk[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def saving(self: CheckpointStore, step: int, *args: Any) -> None:
        state = METRICS.stat()
        checked.append((step, on_disk.get(state.st_ino) == state.st_size, METRICS.parent.stat().st_ino in on_disk))
        save(self, step, *args)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(CheckpointStore, "save", saving)
    train()
    assert checked == [(3, True, True), (6, True, True), (8, True, True)]


def test_lost_lines_are_named_at_every_start_until_they_are_back(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(Preempted):
        train(10, actions={4: stop})
    complete_text = METRICS.read_text()
    drop_lines(4, 5)
    missing = (
        f"{METRICS} lacks lines that were there at the checkpoint of step 5: train/loss of 4 to 5; fingerprint of 5; "
        f"eval/accuracy of 4. "
    )
    with pytest.raises(Preempted):
        train(10, actions={7: stop})
    assert missing in " ".join(capfd.readouterr().out.split())
    # A later checkpoint does not make a gap whole.
    (gap,) = train(10)
    assert gap.startswith(missing.replace("step 5:", "step 8:"))
    assert logged_losses() == [1, 2, 3, 6, 7, 8, 9, 10]
    recomputed_lines = METRICS.read_text().splitlines(keepends=True)
    METRICS.write_text(complete_text + "".join(line for line in recomputed_lines if line not in complete_text))
    assert train(10) == []


@pytest.mark.slow
def test_a_run_directory_that_vanishes_is_named_at_once_and_at_the_next_start() -> None:
    with pytest.raises(MachineError, match=r"metrics.jsonl was removed or replaced while the run wrote it"):
        train(actions={4: lambda: shutil.rmtree("logs")})
    assert list_steps(CHECKPOINTS) == [3]
    (gap,) = train()
    assert "lacks lines that were there at the checkpoint of step 3: train/loss of 1 to 3; fingerprint of 3" in gap
    assert logged_losses() == [*range(4, 9)]


def test_a_file_that_is_renamed_is_named_before_the_next_checkpoint() -> None:
    with pytest.raises(MachineError, match=r"metrics.jsonl was removed or replaced"):
        train(actions={4: lambda: METRICS.rename("elsewhere.jsonl")})
    assert list_steps(CHECKPOINTS) == [3]


def test_a_tracker_that_lost_lines_gets_them_and_is_named(capfd: pytest.CaptureFixture) -> None:
    copy, config = Path("copies/own/metrics.jsonl"), (JsonlConfig(path="copies"),)
    with pytest.raises(Preempted):
        train(actions={5: stop}, tracker=config)
    lines = copy.read_text().splitlines(keepends=True)
    copy.write_text("".join(line for line in lines if '"step": 4,' not in line))
    assert train(tracker=config) == []
    lacked = "the jsonl tracker lacked lines of steps that are done, and now has them from metrics.jsonl: "
    assert f"{lacked}train/loss of 4; eval/accuracy of 4" in " ".join(capfd.readouterr().out.split())
    assert [{**line, "time": 0} for line in read_metrics(copy.parent)] == [
        {**line, "time": 0} for line in read_metrics(RUN)
    ]


def test_without_a_memory_of_the_lines_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of older versions remember none."""
    save = CheckpointStore.save
    monkeypatch.setattr(
        CheckpointStore,
        "save",
        lambda self, step, arrays, record: save(self, step, arrays, {k: v for k, v in record.items() if k != SERIES}),
    )
    with pytest.raises(Preempted):
        train(actions={5: stop})
    drop_lines(4, 5)
    assert train() == []


def test_series_are_small_and_exact() -> None:
    series = Series()
    for step in [*range(10, 1001, 10), 1003, 1004, 1010, 1020]:
        series.add("train/loss", step)
    series.add("train/loss", 1020)
    assert series.to_plain() == {"train/loss": [[10, 1000, 10], [1003, 1004, 1], [1010, 1020, 10]]}
    copied = Series(series.to_plain())
    assert [*copied.steps("train/loss")] == [*range(10, 1001, 10), 1003, 1004, 1010, 1020]
    other = Series({"train/loss": [[10, 1000, 20]], "eval/loss": [[5, 5, 1]]})
    missing = series.missing_in(other)
    assert missing == {"train/loss": [*range(20, 1001, 20), 1003, 1004, 1010, 1020]}
    assert series.union(other).missing_in(series) == {"eval/loss": [5]}
    assert not series.union(other).missing_in(series.union(other))


@pytest.mark.parametrize(
    ("steps", "text"), [([3], "3"), ([1, 2, 3], "1 to 3"), ([1, 3, 4, 9], "1, 3 to 4 and 9")], ids=str
)
def test_steps_for_people(steps: list[int], text: str) -> None:
    assert format_steps(steps) == text
