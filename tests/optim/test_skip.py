"""Skipping of bad steps against a plain twin of the rule, and its survival of what is not finite."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.optim import AdamConfig
from lm_trainer.optim.history import History
from lm_trainer.optim.safeguards import SkipStepConfig
from lm_trainer.step.updates.update import make_update
from tests.optim.common import FEW, Arrays, Run, gradients

GRADS = gradients(0, FEW)


def skipping(value: Any) -> AdamConfig:
    return AdamConfig.model_validate({"skip_bad_steps": value})


def measured(steps: int) -> list[tuple[float, float]]:
    """Losses and gradient norms with a few outliers, some of them early, and one lasting change."""
    rng = np.random.default_rng(3)
    values = [(3 + 0.1 * rng.standard_normal(), 1 + 0.05 * rng.standard_normal()) for _ in range(steps)]
    values[2] = (50.0, 1.0)
    values[20], values[25], values[31] = (9.0, 1.0), (3.0, 30.0), (math.nan, 1.0)
    values[33], values[36] = (3.0, math.inf), (math.nan, math.nan)
    return [(loss + (4 if i >= 45 else 0), norm) for i, (loss, norm) in enumerate(values)]


def expected_skips(values: list[tuple[float, float]], window: int, sigma: float) -> list[bool]:
    losses: deque[float] = deque(maxlen=window)
    norms: deque[float] = deque(maxlen=window)
    skips = []
    for loss, norm in values:
        bad = False
        for history, value in ((losses, loss), (norms, norm)):
            if len(history) >= max(2, window // 2):
                bad |= value > np.mean(history) + sigma * max(np.std(history), 1e-6)
        finite = math.isfinite(loss) and math.isfinite(norm)
        skips.append(bool(bad) or not finite)
        if finite:
            losses.append(loss)
            norms.append(norm)
    return skips


def test_skips_what_the_rule_skips() -> None:
    training = Run(skipping({"rolling_interval_length": 10, "sigma_factor": 4.0}), FEW)
    values, skipped = measured(70), []
    for loss, norm in values:
        before = training.weights()
        after = training.step(GRADS, loss=loss, grad_norm=norm)
        skipped.append(all(np.array_equal(before[name], after[name]) for name in after))
    expected = expected_skips(values, 10, 4.0)
    assert skipped == expected
    assert training.metrics() == {"optim/skipped_steps": sum(expected)}
    # Otherwise the example shows nothing: an early outlier is taken, later ones are not, a lasting change is accepted.
    assert not expected[2]
    assert expected[20]
    assert expected[25]
    assert expected[45]
    assert not any(expected[60:])


def test_a_skipped_step_changes_only_history_and_count() -> None:
    training, twin = (Run(skipping(4), FEW) for _ in range(2))
    for step in range(6):
        training.step(gradients(step, FEW))
        twin.step(gradients(step, FEW))
    training.step(GRADS, loss=1000.0)
    assert_same(training.params, twin.params)
    assert_same(training.state.inner, twin.state.inner)
    assert float(training.state.losses.ring.max()) == 1000.0


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_many_steps_that_are_not_finite_poison_nothing() -> None:
    training = Run(skipping(4), FEW)
    for step in range(4):
        training.step(gradients(step, FEW))
    before = training.weights()
    nan: Arrays = {name: np.full_like(g, np.nan) for name, g in GRADS.items()}
    for _ in range(9):
        training.step(nan)
    training.step(nan, loss=math.nan, grad_norm=1.0)
    assert_same(before, training.weights())
    assert training.metrics()["optim/skipped_steps"] == 10
    after = training.step(GRADS, loss=1.0, grad_norm=float(training.state.grad_norms.ring.min()))
    assert training.metrics()["optim/skipped_steps"] == 10
    assert not np.array_equal(before["embed.tokens"], after["embed.tokens"])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((training.params, training.state)))


def test_the_history_survives_being_saved_by_name() -> None:
    training = Run(skipping(4), FEW, compiled=False)
    for step in range(3):
        training.step(gradients(step, FEW), loss=3.0 + step)
    saved = {name: jnp.asarray(np.asarray(x)) for name, x in named_leaves(training.state).items()}
    assert len(saved) == len(jax.tree.leaves(training.state))
    fresh = Run(skipping(4), FEW, compiled=False)
    fresh.params, fresh.state = training.params, from_named_leaves(fresh.state, saved)
    for loss in (3.0, 900.0, 4.0):
        assert_same(training.step(GRADS, loss=loss), fresh.step(GRADS, loss=loss))
    assert fresh.metrics()["optim/skipped_steps"] == training.metrics()["optim/skipped_steps"] == 1


@pytest.mark.parametrize("config", [skipping(4), AdamConfig()], ids=["skipping", "plain"])
def test_the_training_step_keeps_the_count_of_what_is_not_finite(config: AdamConfig) -> None:
    training = Run(config, FEW, compiled=False)
    update = make_update(config, training.tx)
    scalars = {name: jnp.float32(1) for name in ("loss", "weight", "squares", "learning_rate")}
    params, state, metrics = update(
        training.params, training.state, GRADS, None, scalars | {"loss": jnp.float32("nan")}
    )
    assert_same(params, training.params)
    assert metrics.get("optim/skipped_steps") == (1 if config.skip_bad_steps else None)
    inner = (state.inner, training.state.inner) if config.skip_bad_steps else (state, training.state)
    assert_same(*inner)


@pytest.mark.parametrize(
    ("value", "config"),
    [
        (True, SkipStepConfig(rolling_interval_length=128, sigma_factor=6.0)),
        (64, SkipStepConfig(rolling_interval_length=64)),
        ({"sigma_factor": 3}, SkipStepConfig(sigma_factor=3.0)),
    ],
)
def test_the_short_forms(value: Any, config: SkipStepConfig) -> None:
    assert SkipStepConfig.parse(skipping(value).skip_bad_steps) == config


@pytest.mark.parametrize("value", [0, 1, -3, 2.5, "yes", {"rolling_interval_length": 1}, {"sigma_factor": 0}])
def test_what_is_no_history_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="skip_bad_steps"):
        skipping(value)


def test_off_by_default() -> None:
    training = Run(AdamConfig(), FEW, compiled=False)
    assert training.metrics() == {}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_the_limit_is_mean_plus_deviations_of_what_is_held(count: int) -> None:
    history, held = History.empty(4), deque(maxlen=4)
    for i in range(count):
        history = history.push(jnp.float32(i * i), jnp.bool_(True)).push(jnp.float32(99), jnp.bool_(False))
        held.append(float(i * i))
    expected = np.mean(held) + 2 * np.std(held) if count >= 2 else math.inf
    assert float(history.limit(2.0)) == pytest.approx(expected, rel=1e-5)


def test_a_batch_in_which_no_token_counts_is_not_bad_and_leaves_no_trace_in_the_history() -> None:
    training = Run(skipping(4), FEW, compiled=False)
    update = make_update(training.config, training.tx)
    # Losses below 0, of which a loss of 0 would be an outlier.
    scalars = {"loss": -50.0, "weight": 10.0, "squares": 100.0, "learning_rate": 0.01}
    params, state = training.params, training.state
    for grads, changes in [(GRADS, {})] * 4 + [(None, {"loss": 0.0, "weight": 0.0, "squares": 0.0}), (GRADS, {})]:
        extra_args = {name: jnp.float32(x) for name, x in {**scalars, **changes}.items()}
        grads = grads or jax.tree.map(np.zeros_like, GRADS)
        params, state, metrics = update(params, state, grads, None, extra_args)
        assert metrics["optim/skipped_steps"] == 0
    np.testing.assert_array_equal(state.losses.ring, np.full(4, -5.0, np.float32))
    assert int(state.losses.count) == 5
