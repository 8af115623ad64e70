"""MARS against a plain NumPy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.optim import MarsConfig, decays_by_default
from tests.optim.common import (
    PARAMS,
    STEPS,
    Arrays,
    assert_close,
    changes_the_result,
    gradients,
    initial,
    norm,
    rate,
    run,
)


def numpy_mars(config: MarsConfig) -> Arrays:
    b1, b2 = config.beta1, config.beta2
    weights = {name: x.astype(np.float64) for name, x in initial().items()}
    m = {name: np.zeros_like(x) for name, x in weights.items()}
    v = {name: np.zeros_like(x) for name, x in weights.items()}
    previous_gradient = {name: np.zeros_like(x) for name, x in weights.items()}
    for step in range(STEPS):
        g = {name: x.astype(np.float64) for name, x in gradients(step).items()}
        c = {name: g[name] + config.gamma * b1 / (1 - b1) * (g[name] - previous_gradient[name]) for name in g}
        previous_gradient = g
        scale = min(1.0, config.max_grad_norm / norm(c)) if config.max_grad_norm else 1.0
        for name, param in PARAMS.items():
            m[name] = b1 * m[name] + (1 - b1) * scale * c[name]
            v[name] = b2 * v[name] + (1 - b2) * (scale * c[name]) ** 2
            u = (m[name] / (1 - b1 ** (step + 1))) / (np.sqrt(v[name] / (1 - b2 ** (step + 1))) + config.epsilon)
            decay = config.weight_decay * weights[name] if decays_by_default(param) else 0.0
            weights[name] = weights[name] - rate(step) * (u + decay)
    return weights


@pytest.mark.parametrize("config", [MarsConfig(), MarsConfig(max_grad_norm=None, gamma=0.1, beta1=0.8, epsilon=0.1)])
def test_equals_the_numpy_twin(config: MarsConfig) -> None:
    assert_close(run(config), numpy_mars(config))


def test_without_clipping_it_is_elementwise() -> None:
    assert MarsConfig(max_grad_norm=None).elementwise
    assert not MarsConfig().elementwise


@pytest.mark.parametrize(
    "change",
    [{"beta1": 0.1}, {"beta2": 0.2}, {"epsilon": 0.5}, {"max_grad_norm": 0.1}, {"gamma": 0.1}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(MarsConfig(epsilon=0.1), **change)
