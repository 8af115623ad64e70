"""Clipping of updates by the history of their norms, against a plain twin."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from lm_trainer.optim import AdamConfig, LionConfig
from lm_trainer.optim.clip import clip_update_norm
from lm_trainer.optim.safeguards import ClipUpdateNormConfig
from tests.optim.common import FEW, Arrays, Run, differs, gradients, norm


def updates(step: int) -> Arrays:
    """Updates of about the same norm, but for a few."""
    scale = {12: 40.0, 13: 0.01, 20: 3.0}.get(step, 1.0)
    return {name: (scale * g).astype(np.float32) for name, g in gradients(step, FEW).items()}


@pytest.mark.parametrize(
    "config",
    [
        ClipUpdateNormConfig(rolling_interval_length=6),
        ClipUpdateNormConfig(rolling_interval_length=6, sigma_factor=1.5),
        ClipUpdateNormConfig(),
    ],
)
def test_equals_the_numpy_twin(config: ClipUpdateNormConfig) -> None:
    tx, window = clip_update_norm(config), config.rolling_interval_length
    state, update = tx.init(updates(0)), jax.jit(tx.update)
    norms: deque[float] = deque(maxlen=window)
    clipped = 0
    for step in range(90):
        raw = updates(step)
        clipped_updates, state = update(raw, state)
        limit = np.inf
        if len(norms) >= max(2, window // 2):
            limit = np.mean(norms) + config.sigma_factor * max(np.std(norms), 1e-6)
        scale = min(1.0, limit / norm(raw))
        clipped += scale < 1
        norms.append(norm(raw))
        for name, g in raw.items():
            np.testing.assert_allclose(clipped_updates[name], scale * g, rtol=2e-5, atol=1e-6)
        assert float(state.update_norm) == pytest.approx(norm(raw), rel=1e-5)
    assert clipped > 0 if window == 6 else clipped == 0


def test_an_update_that_is_not_finite_becomes_zero_and_leaves_no_trace() -> None:
    tx = clip_update_norm(ClipUpdateNormConfig(rolling_interval_length=4))
    state, update = tx.init(updates(0)), jax.jit(tx.update)
    for step in range(4):
        _, state = update(updates(step), state)
    bad = {**updates(5), "embed.tokens": np.full((11, 6), np.inf, np.float32)}
    clipped, new_state = update(bad, state)
    assert all(not np.any(x) for x in jax.tree.leaves(clipped))
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_weight_decay_counts_and_the_learning_rate_does_not() -> None:
    config = AdamConfig(clip_update_norm=ClipUpdateNormConfig(rolling_interval_length=4), weight_decay=3.0)
    training = Run(config, FEW, compiled=False)
    before = training.weights()
    after = training.step(gradients(0, FEW), lr=0.25)
    moved = norm({name: (after[name] - before[name]) / 0.25 for name in after})
    assert training.metrics()["optim/update_norm"] == pytest.approx(moved, rel=1e-4)


def test_a_sudden_update_is_clipped_in_a_run() -> None:
    def weights_after(config: AdamConfig) -> Arrays:
        training = Run(config, FEW, compiled=False)
        for _ in range(6):
            training.step(gradients(0, FEW), lr=0.01)
        # An outlier in the weights makes the weight decay, and so the update, large.
        training.params = {name: 100 * x for name, x in training.params.items()}
        return training.step(gradients(0, FEW))

    plain = AdamConfig(weight_decay=1.0)
    assert differs(
        weights_after(plain),
        weights_after(plain.model_copy(update={"clip_update_norm": ClipUpdateNormConfig(rolling_interval_length=4)})),
    )


@pytest.mark.parametrize("kind", [AdamConfig, LionConfig])
def test_it_makes_an_optimizer_need_whole_parameters(kind: Any) -> None:
    assert kind().elementwise
    assert not kind(clip_update_norm=ClipUpdateNormConfig()).elementwise


def test_sizes_that_make_no_sense_are_refused() -> None:
    for bad in ({"rolling_interval_length": 1}, {"sigma_factor": 0}, {"window": 3}):
        with pytest.raises(ValidationError):
            ClipUpdateNormConfig.model_validate(bad)


def test_the_state_is_not_like_a_parameter() -> None:
    tx = clip_update_norm(ClipUpdateNormConfig(rolling_interval_length=4))
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((4,), jnp.float32)})
    marked = optax.tree_utils.tree_map_params(tx, lambda _: True, state, transform_non_params=lambda _: False)
    assert not any(jax.tree.leaves(marked))
