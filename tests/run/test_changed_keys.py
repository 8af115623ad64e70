"""Differences that count between a run's configuration and one that would continue it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lm_trainer.run.config.run_config import RunConfig, numeric_differences, numeric_identity

WRITTEN: dict[str, Any] = {
    "model": {"type": "llama", "hidden_dim": 64},
    "data": {"configs": {"a": {"train_urls": "a.txt"}}, "train_weights": {"a": 1}},
    "trainer": {"seed": 3},
    "optimizer": {"type": "muon"},
}


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.model_validate(WRITTEN)


def without_key(identity: dict[str, Any], *path: str) -> dict[str, Any]:
    result = copy.deepcopy(identity)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return result


@pytest.mark.parametrize(
    "path",
    [
        ("trainer", "allow_nondivisible_batch_size"),
        ("model", "tie_word_embeddings"),
        ("optimizer", "weight_decay"),
        ("data", "configs", "a", "text_key"),
        ("trainer", "model_averaging"),
    ],
)
def test_a_key_that_older_code_lacked_is_no_difference_at_its_default(config: RunConfig, path: tuple[str, ...]) -> None:
    new = numeric_identity(config)
    old = without_key(new, *path)
    assert numeric_differences(old, new, config) == []
    # Without the configuration nobody knows what the default is.
    assert new[path[0]].get(path[1]) is None or len(numeric_differences(old, new)) == 1


@pytest.mark.parametrize("path", [("trainer", "seed"), ("model", "hidden_dim")])
def test_a_key_that_older_code_lacked_is_one_at_another_value(config: RunConfig, path: tuple[str, ...]) -> None:
    new = numeric_identity(config)
    (line,) = numeric_differences(without_key(new, *path), new, config)
    assert line.startswith(f"{'.'.join(path)}: was null, now ")


def test_keys_that_no_longer_decide_numbers_and_keys_that_are_gone(config: RunConfig) -> None:
    new = numeric_identity(config)
    old = copy.deepcopy(new)
    old["trainer"] |= {"steps_per_log": 7, "of_old": 1}
    old["trainer"]["seed"] = 4
    assert numeric_differences(old, new, config) == ["trainer.of_old: was 1, now null", "trainer.seed: was 4, now 3"]
