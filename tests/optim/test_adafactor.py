"""Adafactor against a plain NumPy twin and, on one matrix, against optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import AdafactorConfig, Param
from tests.compiling import quick_jit
from tests.optim.common import STEPS, Run, assert_close, changes_the_result, gradients, initial, rate, run, run_twin

FACTORED = AdafactorConfig(min_dim_size_to_factor=4)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def one_matrix(config: AdafactorConfig, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
    """`p` and `g` are a matrix of one layer, or a vector."""
    decay = 1 - step**-config.decay_rate
    squares = g * g + config.epsilon
    if g.ndim == 2 and min(g.shape) >= config.min_dim_size_to_factor:
        slot["r"] = r = decay * slot.get("r", 0.0) + (1 - decay) * squares.sum(1)
        slot["c"] = c = decay * slot.get("c", 0.0) + (1 - decay) * squares.sum(0)
        v = np.outer(r, c) / r.sum()
    else:
        slot["v"] = v = decay * slot.get("v", 0.0) + (1 - decay) * squares
    u = g / np.sqrt(v)
    if config.clipping_threshold is not None:
        u = u / max(1.0, rms(u) / config.clipping_threshold)
    if config.multiply_by_parameter_scale:
        u = u * max(1e-3, rms(p))
    if config.beta1:
        slot["m"] = u = config.beta1 * slot.get("m", 0.0) + (1 - config.beta1) * u
    return u


def twin(config: AdafactorConfig) -> Any:
    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        layers = p.shape[0] if param.axes[0] == "layers" else 1
        shape = (layers, -1) if param.role == "vector" else param.matrix_shape
        parts = [
            one_matrix(config, q, h, slot.setdefault(str(i), {}), step)
            for i, (q, h) in enumerate(zip(p.reshape(shape), g.reshape(shape), strict=True))
        ]
        return np.stack(parts).reshape(p.shape)

    return update


@pytest.mark.parametrize(
    "config",
    [
        FACTORED,
        AdafactorConfig(),
        AdafactorConfig(
            min_dim_size_to_factor=7,
            decay_rate=0.5,
            beta1=0.9,
            epsilon=1e-3,
            clipping_threshold=None,
            multiply_by_parameter_scale=False,
            weight_decay=0.1,
            max_grad_norm=1.0,
        ),
    ],
    ids=["factored", "whole", "momentum"],
)
def test_equals_the_numpy_twin(config: AdafactorConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)), rtol=1e-4, atol=1e-5)


def test_equals_optax_on_one_matrix() -> None:
    params = {"mlp.up.weight": Param("mlp.up.weight", (6, 7), ("embed", "mlp"))}
    reference = optax.adafactor(rate, min_dim_size_to_factor=4)  # pyright: ignore[reportArgumentType]
    weights: Any = {name: jnp.asarray(x) for name, x in initial(params).items()}
    state, update = reference.init(weights), quick_jit(reference.update)
    for step in range(STEPS):
        updates, state = update(gradients(step, params), state, weights)
        weights = optax.apply_updates(weights, updates)
    assert_close(run(FACTORED, params), weights, rtol=1e-4, atol=1e-5)


def test_second_moments_of_matrices_take_hardly_any_memory() -> None:
    params = {"mlp.up.weight": Param("mlp.up.weight", (3, 40, 50), ("layers", "embed", "mlp"))}
    state = Run(FACTORED, params, compiled=False).state
    assert sum(x.size for x in jax.tree.leaves(state)) < 3 * (40 + 50) + 10


@pytest.mark.parametrize(
    "change",
    [
        {"decay_rate": 0.3},
        {"beta1": 0.9},
        {"epsilon": 1.0},
        {"clipping_threshold": 0.5},
        {"multiply_by_parameter_scale": False},
        {"min_dim_size_to_factor": 128},
        {"max_grad_norm": 0.1},
        {"weight_decay": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(AdafactorConfig(min_dim_size_to_factor=4, epsilon=1e-3), **change)
