"""Checkpoints on request, by SIGUSR1 or files, while the run goes on with the same numbers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import Preempted
from lm_trainer.health import signals
from lm_trainer.run.trainer import Trainer
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings

RUN, CHECKPOINTS = Path("logs/own"), Path("checkpoints/own")


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "_CHECK_SECONDS", 0.0)


def train(steps: int = 8, actions: dict[int, Callable[[], Any]] | None = None, **changes: Any) -> Any:
    """Trains, and does something after the steps in `actions`, which is heeded after the next."""
    policy = {"save_interval": "1h", "keep": [{"every": 1000}], **changes}
    with Trainer(settings(num_train_steps=steps, checkpointer=policy), OPTIMIZER, loss) as trainer:

        @trainer.add_hook
        def _(info: Any) -> None:
            (actions or {}).get(info.step, lambda: None)()

        return trainer.train(trainer.initial_state(model_init=Bigrams), trainer.data_loader(Numbered()))


def steps() -> list[int]:
    return sorted(int(path.name) for path in CHECKPOINTS.glob("[0-9]*"))


def request_by_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


def request_by_file() -> None:
    (RUN / "save-now").touch()


def stop_after_save() -> None:
    (RUN / "stop-after-save").touch()


@pytest.mark.parametrize("ask", [request_by_signal, request_by_file])
def test_a_permanent_checkpoint_while_the_run_goes_on(ask: Callable[[], None], capfd: pytest.CaptureFixture) -> None:
    undisturbed = train().params["table"]
    for path in (RUN, CHECKPOINTS):
        os.rename(path, f"{path}-before")
    final = train(actions={3: ask})
    assert "saving a permanent checkpoint of step 4, as asked" in capfd.readouterr().out
    assert not (RUN / "save-now").exists()
    assert steps() == [4, 8]
    np.testing.assert_array_equal(final.params["table"], undisturbed)


def test_it_stays_when_later_ones_come_and_when_the_run_is_resumed() -> None:
    stop = signal.SIGTERM
    with pytest.raises(Preempted):
        train(actions={2: request_by_file, 4: lambda: signal.raise_signal(stop)})
    assert steps() == [3, 5]
    # Each step is saved, and the temporary one before it goes.
    train(save_interval="0s")
    assert steps() == [3, 8]


def test_a_stop_after_the_next_checkpoint() -> None:
    undisturbed = train().params["table"]
    for path in (RUN, CHECKPOINTS):
        os.rename(path, f"{path}-before")
    with pytest.raises(Preempted, match="stopped by stop-after-save after step 6") as stopped:
        train(actions={2: stop_after_save, 5: request_by_file})
    assert stopped.value.exit_code == 76
    assert not list(RUN.glob("s*-*save")) + list(RUN.glob("save-now"))
    assert steps() == [6]
    np.testing.assert_array_equal(train().params["table"], undisturbed)


def test_the_signal_is_as_before_afterwards() -> None:
    train(1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
