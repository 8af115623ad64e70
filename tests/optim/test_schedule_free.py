"""Schedule-Free AdamW against a plain NumPy twin that keeps x, y and z, and against optax."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import AdamConfig, ScheduleFreeConfig, decays_by_default
from tests.compiling import quick_jit
from tests.optim.common import (
    FEW,
    PARAMS,
    STEPS,
    Arrays,
    Run,
    assert_close,
    changes_the_result,
    differs,
    gradients,
    initial,
    norm,
    rate,
)


def trained(config: ScheduleFreeConfig) -> tuple[Arrays, Arrays]:
    """The trained weights y and the evaluated weights x."""
    return _trained(config.model_dump_json())


@functools.cache
def _trained(written: str) -> tuple[Arrays, Arrays]:
    config = ScheduleFreeConfig.model_validate_json(written)
    training = Run(config)
    for step in range(STEPS):
        training.step(gradients(step), lr=rate(step))
    x = config.eval_params(training.params, training.state)
    return training.weights(), {name: np.asarray(value) for name, value in x.items()}


def numpy_schedule_free(config: ScheduleFreeConfig) -> tuple[Arrays, Arrays]:
    b1, b2 = config.beta1, config.beta2
    x = {name: value.astype(np.float64) for name, value in initial().items()}
    y, z = dict(x), dict(x)
    v = {name: np.zeros_like(value) for name, value in x.items()}
    total = largest = 0.0
    for step in range(STEPS):
        grads = gradients(step)
        clip = min(1.0, config.max_grad_norm / norm(grads)) if config.max_grad_norm else 1.0
        largest = max(largest, rate(step))
        weight = largest**config.weight_lr_power
        total += weight
        for name, param in PARAMS.items():
            g = grads[name].astype(np.float64) * clip
            v[name] = b2 * v[name] + (1 - b2) * g * g
            u = g / (np.sqrt(v[name] / (1 - b2 ** (step + 1))) + config.epsilon)
            decay = config.weight_decay * y[name] if decays_by_default(param) else 0.0
            z[name] = z[name] - rate(step) * (u + decay)
            x[name] = (1 - weight / total) * x[name] + weight / total * z[name]
            y[name] = (1 - b1) * z[name] + b1 * x[name]
    return y, x


@pytest.mark.parametrize(
    "config",
    [
        ScheduleFreeConfig(),
        ScheduleFreeConfig(beta1=0.5, beta2=0.9, epsilon=0.1, weight_lr_power=1.0, weight_decay=1.0),
    ],
)
def test_equals_the_numpy_twin(config: ScheduleFreeConfig) -> None:
    actual, reference = trained(config), numpy_schedule_free(config)
    assert_close(actual[0], reference[0], rtol=1e-4, atol=1e-5)
    assert_close(actual[1], reference[1], rtol=1e-4, atol=1e-5)
    assert differs(actual[0], actual[1])


def test_equals_optax() -> None:
    config = ScheduleFreeConfig(weight_decay=0.0, max_grad_norm=None)
    reference = optax.contrib.schedule_free_adamw(0.01, None, 0.9, 0.95)
    params: Any = {name: jnp.asarray(value) for name, value in initial().items()}
    state, update = quick_jit(reference.init)(params), quick_jit(reference.update)
    for step in range(STEPS):
        updates, state = update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    training = Run(config)
    for step in range(STEPS):
        training.step(gradients(step), lr=0.01)
    x = config.eval_params(training.params, training.state)
    assert_close(training.weights(), params, rtol=1e-4, atol=1e-5)
    assert_close(x, optax.contrib.schedule_free_eval_params(state, params), rtol=1e-4, atol=1e-5)


def test_the_average_is_found_under_the_skipping_of_steps() -> None:
    plain, skipping = ScheduleFreeConfig(), ScheduleFreeConfig(skip_bad_steps=True)
    assert_close(trained(skipping)[1], trained(plain)[1])


def test_a_first_step_at_the_rate_zero_changes_nothing() -> None:
    training = Run(ScheduleFreeConfig(), FEW, compiled=False)
    assert_close(training.step(gradients(0, FEW), lr=0.0), initial(FEW), rtol=1e-6, atol=1e-6)


def test_other_optimizers_are_evaluated_as_they_are_trained() -> None:
    weights = initial()
    assert AdamConfig().eval_params(weights, ()) is weights


@pytest.mark.parametrize(
    "change",
    [
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"epsilon": 0.5},
        {"weight_lr_power": 0.0},
        {"max_grad_norm": 0.1},
        {"weight_decay": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(ScheduleFreeConfig(epsilon=0.1), **change)
