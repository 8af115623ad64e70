"""Notes on settings of the learning rate that have no effect, or another than may be meant."""

from __future__ import annotations

from typing import Any

import pytest

from lm_trainer.run.build.startup_notes import schedule_notes
from lm_trainer.run.config.run_config import RunConfig


def config(**optimizer: Any) -> RunConfig:
    section = {"type": "adam", "warmup": 100, **optimizer}
    return RunConfig.model_validate({"trainer": {"num_train_steps": 200}, "optimizer": section})


def test_a_rewarmup_of_a_single_cycle_is_taken_and_said_to_have_no_effect() -> None:
    with_it, without = config(rewarmup=5), config()
    assert [*schedule_notes(with_it)] == [
        "optimizer.rewarmup has no effect on a single cycle; set optimizer.cycles or cycle_length too"
    ]
    assert [with_it.learning_rate()(step) for step in range(200)] == [without.learning_rate()(s) for s in range(200)]
    assert [*schedule_notes(config(warmup=10, rewarmup=5, cycles=2))] == []
    assert [*schedule_notes(without)] == []


@pytest.mark.parametrize("kind", ["adam", "lion", "muon", "sophia-h", "soap"])
def test_every_optimizer_takes_it(kind: str) -> None:
    assert len([*schedule_notes(config(type=kind, rewarmup=0.05))]) == 1


def test_a_timescale_below_the_warm_up_does_not_reach_the_peak() -> None:
    short = config(learning_rate=1.0, lr_schedule={"type": "inv_sqrt", "timescale": 10})
    assert max(short.learning_rate()(step) for step in range(200)) == pytest.approx((10 / 100) ** 0.5)
    assert [*schedule_notes(short)] == [
        "optimizer.lr_schedule: a timescale of 10 steps is shorter than the warm-up of 100, so that the learning rate "
        "reaches 0.316, and not 1"
    ]
    long = config(learning_rate=1.0, lr_schedule={"type": "inv_sqrt", "timescale": 100})
    assert max(long.learning_rate()(step) for step in range(200)) == 1.0
    assert [*schedule_notes(long)] == []
