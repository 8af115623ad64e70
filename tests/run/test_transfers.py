"""Transfers between host and devices in a running loop: each is asked for, none happens by the way.

A value of the host that is handed to a compiled program is sent there at each call, and one that is read in the middle
of a step makes the host wait. JAX's transfer guard refuses the first kind on every backend.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.optim import AdamConfig, MuonConfig, OptimizerConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.training import metrics
from lm_trainer.run.training.hooks import StepInfo
from tests.run.own_model import OPTIMIZER, STEPS, Bigrams, Numbered, loss, settings

EVERYTHING: dict[str, Any] = {
    "steps_per_eval": 2,
    "watch": {"interval": 2, "watch_targets": ["grads", "params", "updates", "opt_state"], "include_histograms": True},
    "model_averaging": {"type": "ema", "beta": 0.9},
    "checkpointer": {"save_interval": "1h", "keep": [{"every": 2}]},
}


@pytest.fixture(autouse=True)
def _here_and_unguarded_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    jax.config.update("jax_transfer_guard", None)


def test_the_guard_sees_a_value_of_the_host() -> None:
    jax.config.update("jax_transfer_guard", "disallow")
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        jax.jit(lambda x, y: x + y)(jax.device_put(1.0), 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("determinism", ["elastic", "fast"])
def test_a_running_loop_transfers_nothing_by_the_way(determinism: str) -> None:
    run_guarded(OPTIMIZER, determinism=determinism, **EVERYTHING)


@pytest.mark.parametrize("optimizer", [MuonConfig(), AdamConfig(skip_bad_steps=True)], ids=lambda config: config.type)
def test_an_update_transfers_nothing_by_the_way(optimizer: OptimizerConfig) -> None:
    run_guarded(optimizer)


@pytest.mark.parametrize("determinism", ["elastic", "fast"])
def test_in_a_step_the_host_waits_for_nothing_but_the_metrics_of_the_step_before(
    monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    waits: list[str] = []
    read: list[Any] = []
    main_thread = threading.get_ident()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(value: Any, *args: Any, **settings: Any) -> Any:
            if threading.get_ident() == main_thread and any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
                waits.append(name)
                read.append(value)
            return function(value, *args, **settings)

        monkeypatch.setattr(module, name, counted)

    for module, name in ((np, "asarray"), (np, "array"), (jax, "block_until_ready"), (jax, "device_get")):
        count(module, name)
    count(metrics, "read_scalar")
    previous: list[jax.Array] = []
    counts: list[Counter[str]] = []

    def num_read(arrays: list[jax.Array]) -> int:
        return sum(any(array is value for value in read) for array in arrays)

    changes: dict[str, Any] = {"steps_per_eval": 99, "checkpointer": {"keep": [{"every": 99}]}}
    with Trainer(settings(determinism=determinism, **changes), OPTIMIZER, noisy) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        for info in trainer.training_steps(state, trainer.data_loader(Numbered())):
            if 2 < info.step < STEPS:
                assert num_read(previous) == len(previous)
                counts.append(Counter(waits))
            previous = [*info.metrics.values()]
            assert info.step == STEPS or num_read(previous) == 0, "the metrics of this step may still be computed"
            waits.clear()
            read.clear()
    assert counts == [Counter(read_scalar=len(previous), asarray=len(previous))] * (STEPS - 3)


def noisy(model: Bigrams, batch: Batch, key: jax.Array | None) -> Any:
    """The loss with a random factor: JAX drops the number of the step from a program that draws nothing."""
    total, weight, metrics = loss(model, batch, key)
    return total if key is None else total * jax.random.uniform(key, minval=0.9), weight, metrics


def run_guarded(optimizer: OptimizerConfig, **changes: Any) -> None:
    """Trains with the guard from the second step on: what is compiled in the first may hold constants of the host."""

    def guard(info: StepInfo) -> None:
        if info.step == 2:
            jax.config.update("jax_transfer_guard", "disallow")

    with Trainer(settings(**{"max_devices": 2, **changes}), optimizer, noisy) as trainer:
        state = trainer.initial_state(model_init=Bigrams)
        trainer.add_eval_hook(Numbered(), "held-out")
        trainer.add_hook(guard)
        assert trainer.train(state, trainer.data_loader(Numbered())).step == STEPS
