"""AdamW with all its fields against a plain NumPy twin and against optax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import AdamConfig, Param, decays_by_default
from tests.compiling import quick_jit
from tests.optim.common import (
    PARAMS,
    STEPS,
    Run,
    assert_close,
    changes_the_result,
    gradients,
    initial,
    norm,
    rate,
    run,
    run_twin,
)


def twin(config: AdamConfig) -> Any:
    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        b1, b2 = config.beta1, config.beta2
        slot["m"] = m = b1 * slot.get("m", 0.0) + (1 - b1) * g
        slot["v"] = v = b2 * slot.get("v", 0.0) + (1 - b2) * g * g
        if config.nesterov:
            m_hat = b1 * m / (1 - b1 ** (step + 1)) + (1 - b1) * g / (1 - b1**step)
        else:
            m_hat = m / (1 - b1**step)
        u = m_hat / (np.sqrt(v / (1 - b2**step)) + config.epsilon)
        if config.update_rms_clipping is not None:
            layers = u if param.axes[0] == "layers" else u[None]
            layers = np.stack([x / max(1.0, np.sqrt(np.mean(x * x)) / config.update_rms_clipping) for x in layers])
            u = layers.reshape(u.shape)
        return u

    return update


@pytest.mark.parametrize(
    "config",
    [
        AdamConfig(),
        AdamConfig(max_grad_norm=None, weight_decay=0.0, nesterov=True),
        AdamConfig(max_grad_norm=0.5, beta1=0.8, beta2=0.99, epsilon=1e-3, weight_decay=0.3, update_rms_clipping=0.7),
    ],
    ids=["default", "nesterov", "rms clipping"],
)
def test_equals_the_numpy_twin(config: AdamConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)))


def test_equals_optax_adamw() -> None:
    mask = {name: decays_by_default(param) for name, param in PARAMS.items()}
    reference = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask),  # pyright: ignore[reportArgumentType]
    )
    params: Any = {name: jnp.asarray(x) for name, x in initial().items()}
    state, update = quick_jit(reference.init)(params), quick_jit(reference.update)
    for step in range(STEPS):
        updates, state = update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    assert_close(run(AdamConfig()), params)


def test_adamc_decays_with_the_square_of_the_learning_rate() -> None:
    config = AdamConfig(learning_rate=0.04, adamc_weight_decay=True, weight_decay=0.5)
    reference = run_twin(AdamConfig(weight_decay=0.0), twin(config))
    plain = {name: x.astype(np.float64) for name, x in initial().items()}
    # Adam's update does not depend on the weights: the decayed weights follow from the undecayed steps.
    training, decayed = Run(AdamConfig(weight_decay=0.0)), dict(plain)
    for step in range(STEPS):
        before = training.weights()
        after = training.step(gradients(step), lr=rate(step))
        for name, param in PARAMS.items():
            shrink = rate(step) * (rate(step) / 0.04) * 0.5 if decays_by_default(param) else 0.0
            decayed[name] = decayed[name] * (1 - shrink) + (after[name].astype(np.float64) - before[name])
    actual = run(config)
    assert_close(actual, decayed, rtol=1e-4, atol=1e-5)
    assert not np.allclose(actual["stack.blocks.0.mlp.up.weight"], reference["stack.blocks.0.mlp.up.weight"], atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"beta1": 0.8},
        {"beta2": 0.9},
        {"epsilon": 1e-2},
        {"max_grad_norm": 0.1},
        {"weight_decay": 0.3},
        {"nesterov": True},
        {"update_rms_clipping": 0.05},
        {"adamc_weight_decay": True},
        {"weight_decay_modules": ".*norm"},
        {"default_weight_decay_mask": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(AdamConfig(epsilon=0.1), **change)


def test_what_is_elementwise() -> None:
    assert AdamConfig().elementwise
    assert AdamConfig.model_validate({"skip_bad_steps": True}).elementwise
    assert not AdamConfig(update_rms_clipping=1.0).elementwise
    assert not AdamConfig.model_validate({"clip_update_norm": {}}).elementwise


def test_a_large_gradient_is_clipped_to_its_given_norm() -> None:
    training = Run(AdamConfig(epsilon=1.0, beta1=0.0, beta2=0.0, weight_decay=0.0))
    before = training.weights()
    grads = gradients(0)
    after = training.step(grads, lr=1.0, grad_norm=4 * norm(grads))
    g = {name: x / (4 * norm(grads)) for name, x in grads.items()}
    assert_close(after, {name: before[name] - g[name] / (np.abs(g[name]) + 1.0) for name in g})
