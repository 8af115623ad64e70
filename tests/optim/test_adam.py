"""AdamW against a plain NumPy twin and against optax.adamw."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import AdamConfig, Param, decays_by_default

SHAPES = {"w": (5, 7), "norm.scale": (7,), "bias": (7,)}
AXES = {"w": ("embed", "mlp"), "norm.scale": ("embed",), "bias": ("mlp",)}
PARAMS = {name: Param(name, shape, AXES[name]) for name, shape in SHAPES.items()}
DECAYS = {"w": True, "norm.scale": False, "bias": False}
STEPS = 25


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def norm(grads: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values())))


def rate(step: Any) -> Any:
    return 0.01 * (1 + step)


def run(config: AdamConfig) -> dict[str, np.ndarray]:
    tx = config.build(PARAMS)
    params: Any = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    state = tx.init(params)
    for step in range(STEPS):
        grads = gradients(step)
        updates, state = jax.jit(tx.update)(
            grads, state, params, learning_rate=jnp.float32(rate(step)), grad_norm=jnp.float32(norm(grads))
        )
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(x) for name, x in params.items()}


def numpy_adamw(config: AdamConfig) -> dict[str, np.ndarray]:
    params = {name: np.ones(shape) for name, shape in SHAPES.items()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        grads = gradients(step)
        clip = min(1.0, config.max_grad_norm / norm(grads)) if config.max_grad_norm else 1.0
        for name, p in params.items():
            g = grads[name].astype(np.float64) * clip
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * g * g
            direction = (m[name] / (1 - config.beta1 ** (step + 1))) / (
                np.sqrt(v[name] / (1 - config.beta2 ** (step + 1))) + config.epsilon
            )
            decay = config.weight_decay * p if DECAYS[name] else 0.0
            params[name] = p - rate(step) * (direction + decay)
    return params


CONFIGS = [
    AdamConfig(),
    AdamConfig(max_grad_norm=None, weight_decay=0.0),
    AdamConfig(max_grad_norm=0.5, beta1=0.8, beta2=0.99, epsilon=1e-3, weight_decay=0.3),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_equals_the_numpy_twin(config: AdamConfig) -> None:
    ours, reference = run(config), numpy_adamw(config)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], reference[name], rtol=2e-5, atol=2e-6)


def test_equals_optax_adamw() -> None:
    config = AdamConfig(max_grad_norm=1.0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=DECAYS))
    params: Any = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    state = tx.init(params)
    for step in range(STEPS):
        updates, state = tx.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    ours = run(config)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], np.asarray(params[name]), rtol=2e-5, atol=2e-6)


def test_every_setting_matters() -> None:
    base = run(AdamConfig())
    for change in ({"beta1": 0.8}, {"beta2": 0.9}, {"epsilon": 1e-2}, {"max_grad_norm": 0.1}, {"weight_decay": 0.3}):
        changed = run(AdamConfig().model_copy(update=change))
        if "max_grad_norm" in change:
            # Adam is invariant to the scale of all gradients together, not of some: clipping shows through epsilon.
            changed = run(AdamConfig(epsilon=0.1, max_grad_norm=0.1))
            assert not np.allclose(changed["w"], run(AdamConfig(epsilon=0.1))["w"], atol=1e-6), change
            continue
        assert not np.allclose(base["w"], changed["w"], atol=1e-6), change


@pytest.mark.parametrize(
    ("name", "axes", "decays"),
    [
        ("stack.blocks.0.mlp.up.weight", ("layers", "embed", "mlp"), True),
        ("stack.blocks.0.attention.q.bias", ("layers", "heads", "head_size"), False),
        ("final_norm.scale", ("embed",), False),
        ("stack.blocks.0.norm.scale", ("layers", "embed"), False),
        ("embed.tokens", ("vocab", "embed"), False),
        ("embed.positions", ("position", "embed"), False),
        ("head.weight", ("vocab", "embed"), True),
    ],
)
def test_what_decays(name: str, axes: tuple[str, ...], decays: bool) -> None:
    assert decays_by_default(Param(name, (2,) * len(axes), axes)) is decays
