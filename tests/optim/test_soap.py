"""SOAP against a plain NumPy twin, in float64, where eigenvectors of both are the same to the last digits."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import Param
from lm_trainer.optim.blocks import Blocks, fit_blocks, matrix_sizes
from lm_trainer.optim.soap import SoapConfig
from tests.compiling import quick_jit
from tests.optim.common import Arrays, differs, gradients, initial, norm, rate, run_in_float64

# Square, so that no eigenvalue is zero: vectors of the null space are anybody's choice.
PARAMS = {
    "up.weight": Param("up.weight", (2, 6, 6), ("layers", "embed", "mlp")),
    "embed.tokens": Param("embed.tokens", (11, 6), ("vocab", "embed")),
    "up.bias": Param("up.bias", (2, 6), ("layers", "mlp")),
}
STEPS = 22


def run(config: SoapConfig, *, steps: int = STEPS) -> Arrays:
    return run_in_float64(config, PARAMS, steps=steps)


def iterate(gram: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-np.diag(q.T @ gram @ q), kind="stable")
    return np.linalg.qr(gram @ q[:, order])[0], order


class Side:
    """One side of one block: identity where it is not preconditioned."""

    def __init__(self, size: int, active: bool):
        self.active, self.gram, self.q = active, np.zeros((size, size)), np.eye(size)

    def observe(self, gram: np.ndarray, beta: float) -> None:
        self.gram = beta * self.gram + (1 - beta) * gram

    def begin(self) -> None:
        if self.active:
            self.q = np.linalg.eigh(self.gram)[1][:, ::-1]

    def renew(self) -> Any:
        if not self.active:
            return slice(None)
        self.q, order = iterate(self.gram, self.q)
        return order


class Block:
    """SOAP for one block."""

    def __init__(self, config: SoapConfig, shape: tuple[int, int], active: tuple[bool, bool]):
        self.config, self.sides = config, [Side(size, on) for size, on in zip(shape, active, strict=True)]
        self.m, self.v, self.step = np.zeros(shape), np.zeros(shape), 0

    def __call__(self, g: np.ndarray) -> np.ndarray:
        c, (left, right), update = self.config, self.sides, np.zeros_like(g)
        if self.step:
            self.m = c.beta1 * self.m + (1 - c.beta1) * g
            self.v = c.beta2 * self.v + (1 - c.beta2) * (left.q.T @ g @ right.q) ** 2
            m, v = self.m / (1 - c.beta1**self.step), self.v / (1 - c.beta2**self.step)
            update = left.q @ ((left.q.T @ m @ right.q) / (np.sqrt(v) + c.epsilon)) @ right.q.T
        left.observe(g @ g.T, c.shampoo_beta)
        right.observe(g.T @ g, c.shampoo_beta)
        if self.step == 0:
            left.begin()
            right.begin()
        elif self.step % c.precondition_frequency == 0:
            self.v = self.v[left.renew()][:, right.renew()]
        self.step += 1
        return update


def twin(config: SoapConfig, size: int, *, embedding: tuple[bool, bool]) -> Arrays:
    """`size` is that of the blocks of up.weight; the embedding is one block."""
    weights: Any = {name: np.float64(x) for name, x in initial(PARAMS).items()}
    n = 6 // size
    up = [[[Block(config, (size, size), (True, True)) for _ in range(n)] for _ in range(n)] for _ in range(2)]
    tokens, bias = Block(config, (11, 6), embedding), Block(config, (12, 1), (False, False))
    for step in range(STEPS):
        grads = gradients(step, PARAMS)
        clip = min(1.0, (config.max_grad_norm or np.inf) / norm(grads))
        g: Any = {name: clip * np.float64(x) for name, x in grads.items()}
        parts = [
            [[up[k][i][j](g["up.weight"][k, i * size :, j * size :][:size, :size]) for j in range(n)] for i in range(n)]
            for k in range(2)
        ]
        moves = {
            "up.weight": np.stack([np.block(rows) for rows in parts]) + config.weight_decay * weights["up.weight"],
            "embed.tokens": tokens(g["embed.tokens"]),
            "up.bias": bias(g["up.bias"].reshape(12, 1)).reshape(2, 6),
        }
        weights = {name: w - rate(step) * moves[name] for name, w in weights.items()}
    return weights


@pytest.mark.parametrize(
    ("config", "size", "embedding"),
    [
        (SoapConfig(precondition_frequency=3, weight_decay=0.1, max_precond_dim=10), 6, (False, True)),
        (SoapConfig(precondition_frequency=1, block_size=3, max_precond_dim=8, beta1=0.8), 3, (False, True)),
    ],
)
def test_equals_the_numpy_twin(config: SoapConfig, size: int, embedding: tuple[bool, bool]) -> None:
    # Where the embedding's outputs are cut as well, the twin keeps them whole.
    keep = set(PARAMS) if size == 6 else {"up.weight", "up.bias"}
    actual, reference = run(config), twin(config, size, embedding=embedding)
    for name in keep:
        np.testing.assert_allclose(actual[name], reference[name], rtol=1e-5, atol=1e-6, err_msg=name)


CHANGES = {
    "weight_decay": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "shampoo_beta": 0.5,
    "epsilon": 0.1,
    "precondition_frequency": 1,
    "max_precond_dim": 5,
    "one_diag": True,
    "partition_grads_into_blocks": False,
    "block_size": 2,
    "max_grad_norm": 0.05,
}
BASE = SoapConfig(block_size=3, epsilon=1e-3, precondition_frequency=2)


@functools.cache
def baseline() -> Arrays:
    return run(BASE, steps=5)


@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_every_field_matters(field: str, value: Any) -> None:
    assert differs(baseline(), run(BASE.model_validate({**BASE.model_dump(), field: value}), steps=5))


def test_an_ill_conditioned_quadratic_is_solved() -> None:
    """Condition number 1000, in a basis that is not that of the axes."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((6, 6)))[0] for _ in range(2))
    scale = np.outer(np.logspace(-1.5, 0, 6), np.logspace(-1.5, 0, 6))
    target = u @ np.ones((6, 6)) @ v.T
    config = SoapConfig(precondition_frequency=1, max_grad_norm=None, beta1=0.9)
    tx = config.build({"w": Param("w", (6, 6), ("embed", "mlp"))})
    params: Any = {"w": jnp.zeros((6, 6))}
    state, update = quick_jit(tx.init)(params), quick_jit(tx.update)
    for step in range(150):
        error = u.T @ (np.asarray(params["w"], np.float64) - target) @ v
        grads = {"w": (u @ (scale * error) @ v.T).astype(np.float32)}
        lr = jnp.float32(0.05 * (1 - step / 150))
        updates, state = update(grads, state, params, learning_rate=lr, grad_norm=jnp.float32(1))
        params = optax.apply_updates(params, updates)
    assert np.sum(scale * error**2) < 1e-2 * np.sum(scale)


def test_blocks_cut_each_layer_by_itself_and_join_again() -> None:
    param = Param("q", (3, 8, 2, 6), ("layers", "embed", "heads", "head_size"))
    stacked, inputs, outputs = matrix_sizes(param)
    blocks = Blocks(param.shape, stacked, fit_blocks(inputs, 4), fit_blocks(outputs, 4))
    x = np.arange(3 * 8 * 12, dtype=np.float32).reshape(param.shape)
    x_KIO = np.asarray(blocks.split(jnp.asarray(x)))
    assert x_KIO.shape == (blocks.count, 4, 4) == (18, 4, 4)
    np.testing.assert_array_equal(x_KIO[1], x[0].reshape(8, 12)[:4, 4:8])
    np.testing.assert_array_equal(blocks.join(jnp.asarray(x_KIO)), x)
    assert [fit_blocks(768, 256), fit_blocks(100, 256), fit_blocks(257, 256), fit_blocks(11008, 256)] == [
        (3, 256),
        (1, 100),
        (1, 257),
        (43, 256),
    ]
