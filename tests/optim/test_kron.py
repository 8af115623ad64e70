"""Kron against a plain NumPy twin, which is given the same random numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import Param
from lm_trainer.optim.kron import KronConfig
from tests.compiling import quick_jit
from tests.optim.common import Arrays, differs, gradients, initial, norm, rate, run_in_float64

PARAMS = {
    "embed.tokens": Param("embed.tokens", (11, 6), ("vocab", "embed")),
    "up.bias": Param("up.bias", (2, 5), ("layers", "mlp")),
    "up.weight": Param("up.weight", (2, 6, 5), ("layers", "embed", "mlp")),
}
STEPS = 22
HALF = 10**-0.5


def run(config: KronConfig, *, steps: int = STEPS) -> Arrays:
    return run_in_float64(config, PARAMS, steps=steps)


def noise(step: int, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """The draws of the i-th parameter by name, at a step counted from 1."""
    with jax.enable_x64(True):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(42), step), i)
        return np.asarray(jax.random.normal(key, shape, jnp.float64))


def bound(x: np.ndarray) -> float:
    top = np.abs(x).max()
    y = x / top
    row = y[:, np.argmax((y * y).sum(0))] @ y
    return top * float(np.linalg.norm(row / np.linalg.norm(row) @ y))


def moved(q: np.ndarray, terms: tuple[np.ndarray, np.ndarray], lr: float, diagonal: bool) -> np.ndarray:
    aa, bb = terms
    if diagonal:
        d = np.diag(aa - bb)
        return q - lr / np.abs(np.diag(aa + bb)).max() * np.diag(d) @ q
    return q - lr / bound(aa + bb) * np.triu(aa - bb) @ q


class Block:
    """Both factors of one block, diagonal ones as diagonal matrices."""

    def __init__(self, config: KronConfig, shape: tuple[int, int], diagonal: tuple[bool, bool]):
        self.config, self.diagonal, self.vector = config, diagonal, shape[1] == 1
        scale = config.preconditioner_init_scale ** (1 if self.vector else 0.5)
        self.left, self.right = scale * np.eye(shape[0]), (1 if self.vector else scale) * np.eye(shape[1])

    def learn(self, g: np.ndarray, v: np.ndarray) -> None:
        g = g + np.sqrt(np.finfo(np.float32).eps) * np.abs(g).mean() * v
        a = self.left @ g @ self.right.T
        b = np.linalg.inv(self.left).T @ v @ np.linalg.inv(self.right)
        lr = self.config.preconditioner_lr
        self.left = moved(self.left, (a @ a.T, b @ b.T), lr, self.diagonal[0])
        if self.vector:
            return
        self.right = moved(self.right, (a.T @ a, b.T @ b), lr, self.diagonal[1])
        ratio = np.sqrt(np.abs(self.right).max() / np.abs(self.left).max())
        self.left, self.right = self.left * ratio, self.right / ratio

    def __call__(self, g: np.ndarray) -> np.ndarray:
        return self.left.T @ self.left @ g @ self.right.T @ self.right


def twin(config: KronConfig, diagonal: dict[str, tuple[bool, bool]]) -> Arrays:
    weights: Any = {name: np.float64(x) for name, x in initial(PARAMS).items()}
    m: Any = {name: np.zeros(x.shape) for name, x in weights.items()}
    shapes = {"embed.tokens": (1, 11, 6), "up.bias": (2, 5, 1), "up.weight": (2, 6, 5)}
    blocks = {n: [Block(config, shapes[n][1:], diagonal[n]) for _ in range(shapes[n][0])] for n in shapes}
    since = 0
    for step in range(1, STEPS + 1):
        grads = gradients(step - 1, PARAMS)
        clip = min(1.0, (config.max_grad_norm or np.inf) / norm(grads))
        frequency = np.clip(
            np.exp(-0.001 * (step - config.update_prob_flat_start)), config.preconditioner_update_probability, 1
        )
        since += 1
        due = since >= 1 / frequency
        since = 0 if due else since
        for i, name in enumerate(PARAMS):
            g = np.float64(grads[name]) * clip
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
            hat = (m[name] / (1 - config.beta1**step)).reshape(shapes[name])
            draws = noise(step, i, shapes[name])
            for k, block in enumerate(blocks[name]):
                if due:
                    block.learn(hat[k], draws[k])
            u = np.stack([block(hat[k]) for k, block in enumerate(blocks[name])])
            u = u / np.maximum(1, np.sqrt((u**2).mean(axis=(1, 2), keepdims=True)) / 1.1)
            decay = config.weight_decay * weights[name] if name == "up.weight" else 0
            weights[name] = weights[name] - rate(step - 1) * (u.reshape(weights[name].shape) + decay)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "diagonal"),
    [
        (KronConfig(), {"embed.tokens": (False, False), "up.weight": (False, False)}),
        (
            KronConfig(memory_save_mode="one_diag", update_prob_flat_start=0, preconditioner_init_scale=0.5),
            {"embed.tokens": (True, False), "up.weight": (True, False)},
        ),
        (KronConfig(max_size_triangular=5), {"embed.tokens": (True, True), "up.weight": (True, False)}),
    ],
)
def test_equals_the_numpy_twin(config: KronConfig, diagonal: dict[str, tuple[bool, bool]]) -> None:
    actual, reference = run(config), twin(config, {**diagonal, "up.bias": (True, True)})
    for name in PARAMS:
        np.testing.assert_allclose(actual[name], reference[name], rtol=1e-5, atol=1e-6, err_msg=name)


CHANGES = {
    "weight_decay": 0.5,
    "beta1": 0.5,
    "normalize_grads": True,
    "preconditioner_update_probability": 1.0,
    "update_prob_flat_start": 3,
    "max_size_triangular": 5,
    "memory_save_mode": "all_diag",
    "preconditioner_lr": 0.02,
    "preconditioner_init_scale": 0.3,
    "partition_grads_into_blocks": False,
    "block_size": 2,
    "max_grad_norm": 0.05,
}


@functools.cache
def baseline(flat_start: int) -> tuple[KronConfig, Arrays]:
    config = KronConfig(block_size=3, update_prob_flat_start=flat_start)
    return config, run(config, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_every_field_matters(field: str, value: Any) -> None:
    base, weights = baseline(0 if "prob" in field else 500)
    assert differs(weights, run(base.model_validate({**base.model_dump(), field: value}), steps=5))


@pytest.mark.slow
def test_an_ill_conditioned_quadratic_is_solved() -> None:
    scale = np.outer(np.logspace(-1, 0, 6), np.logspace(-1, 0, 6)).astype(np.float32)
    tx = KronConfig(max_grad_norm=None, weight_decay=0.0).build({"w": Param("w", (6, 6), ("embed", "mlp"))})
    params: Any = {"w": jnp.zeros((6, 6))}
    state, update = tx.init(params), quick_jit(tx.update)
    for step in range(200):
        grads = {"w": scale * (np.asarray(params["w"]) - 1)}
        lr = jnp.float32(0.05 * (1 - step / 200))
        updates, state = update(grads, state, params, learning_rate=lr, grad_norm=jnp.float32(1))
        params = optax.apply_updates(params, updates)
    assert np.sum(scale * (np.asarray(params["w"]) - 1) ** 2) < 1e-2 * np.sum(scale)
