"""The loop waits for data in the making: visibly, without losing steps, and not longer than it is let."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import MachineError, Preempted, UserError
from lm_trainer.health.signals import StopRequest
from lm_trainer.health.watchdog import Watchdog, WatchdogConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.training.batches import BatchIterator, DataWait
from lm_trainer.run.weights.initial_weights import _check_same_data
from lm_trainer.trackers import Progress
from tests.run.own_model import OPTIMIZER, STEPS, Bigrams, Numbered, loss, settings
from tests.run.test_trainer import assert_close, numpy_adam


class InTheMaking(Numbered):
    """Batches of which some are asked for a few times before they are there, or never come."""

    def __init__(self, *, fails_at: int = -1, stops_at: int = -1, waits: int = 3):
        self.fails_at, self.stops_at, self.waits = fails_at, stops_at, waits

    def train(self, *args: Any, **options: Any) -> Any:
        return _Batches(super().train(*args, **options) if options else iter(()), self)

    def batches(self, *args: Any, **options: Any) -> Any:
        assert not self.waits, "the held-out set is read before it is there"
        return super().batches(*args, **options)

    @property
    def growing(self) -> bool:
        return self.waits > 0

    def missing_tokens(self) -> str | None:
        self.waits -= 1
        return f"waiting for text ({self.waits} left)" if self.waits else None


class _Batches(Iterator[Batch]):
    def __init__(self, batches: Iterator[Batch], data: InTheMaking):
        self._batches, self._data, self._step, self._asked = batches, data, 0, 0

    growing = True

    def missing_tokens(self) -> str | None:
        if self._step == self._data.fails_at:
            raise MachineError("the disk is full: cannot write a part")
        if self._step == self._data.stops_at:
            if not self._asked:
                signal.raise_signal(signal.SIGTERM)
            self._asked += 1
            assert self._asked < 100, "the signal is not heard"
            return "waiting for text"
        self._asked += 1
        return f"waiting for tokenised data ({self._asked} of 2)" if self._asked < 3 else None

    def __next__(self) -> Batch:
        self._step, self._asked = self._step + 1, 0
        return next(self._batches)


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_trainer.run.training.batches._POLL_SECONDS", 0.001)


def run(data: Any) -> tuple[Any, str]:
    """The last state, and what was shown."""
    out = io.StringIO()
    with Trainer(settings(), OPTIMIZER, loss, progress=Progress(STEPS, stream=out)) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        trainer.add_eval_hook(InTheMaking())
        state = trainer.train(state, trainer.data_loader(data))
    return state, out.getvalue()


@pytest.mark.slow
def test_data_that_do_not_come_cost_no_step() -> None:
    with pytest.raises(MachineError, match="the disk is full: cannot write a part"):
        run(InTheMaking(fails_at=2))
    assert sorted(p.name for p in Path("checkpoints/own").glob("[0-9]*")) == ["2"], "the steps done are saved"
    state, shown = run(InTheMaking())
    assert "resumed at step 2" in shown
    assert "waiting for tokenised data (1 of 2) ..." in shown
    assert "waiting for text (2 left) ..." in shown, "the evaluation waits as visibly"
    assert_close(state.params, numpy_adam(STEPS))
    lines = [json.loads(line) for line in Path("logs/own/metrics.jsonl").read_text().splitlines()]
    shares = [line["throughput/data_wait"] for line in lines if "throughput/step_time" in line]
    assert shares
    assert all(0 <= share <= 1 for share in shares)


def test_a_stop_signal_ends_the_waiting() -> None:
    saved_states: list[Any] = []
    state: Any = SimpleNamespace(step=3)
    with StopRequest() as stop, closing(Progress(STEPS, stream=io.StringIO())) as progress:
        stop.arm()
        watchdog = Watchdog(WatchdogConfig(), Path())
        feed = BatchIterator(InTheMaking(stops_at=0).train(), DataWait(stop, progress, watchdog, saved_states.append))
        with pytest.raises(Preempted, match="stopped by SIGTERM after step 3; everything is saved"):
            feed.next(state)
    assert saved_states == [state]


class _Restored:
    step = 4

    def __init__(self, fingerprint: Any):
        self.record = {"data_fingerprint": fingerprint}


@pytest.mark.parametrize(
    ("saved", "current"),
    [
        ("t", {"tokens": "t", "sources": "s"}),  # of a version that knew only the tokens
        ({"sources": "s"}, {"tokens": "t", "sources": "s"}),
        ({"tokens": "t", "sources": "s"}, {"sources": "s"}),
        ({"tokens": "t", "sources": "elsewhere"}, {"tokens": "t", "sources": "s"}),
    ],
)
def test_a_run_knows_its_data_by_what_is_known(saved: Any, current: Any) -> None:
    _check_same_data(_Restored(saved), current, False)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        ("t", {"tokens": "u", "sources": "s"}, r"other data \(fingerprint t, now u\): the text"),
        ({"sources": "s"}, {"tokens": "t", "sources": "r"}, r"\(fingerprint s, now r\): the name, size or time of"),
        ({"tokens": "t", "sources": "s"}, {"tokens": "u", "sources": "s"}, "fingerprint t, now u"),
        ("t", {"sources": "s"}, "run `lmt data build` with this configuration first"),
    ],
)
def test_a_run_refuses_other_data(saved: Any, current: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _check_same_data(_Restored(saved), current, False)  # pyright: ignore[reportArgumentType]
