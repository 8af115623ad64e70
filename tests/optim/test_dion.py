"""Dion against a plain NumPy twin of the paper's algorithm, and what the algorithm promises."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.optim.dion import DionConfig
from lm_trainer.optim.params import Param
from tests.optim.common import PARAMS, Run, assert_close, changes_the_result, rate, run, run_twin
from tests.optim.test_muon import adam_direction, other_rate


def first_bases(config: DionConfig) -> dict[str, np.ndarray]:
    """The random bases that a run starts with, by parameter."""
    state = config.transform(PARAMS).init({name: np.zeros(param.shape, np.float32) for name, param in PARAMS.items()})
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        name: np.asarray(leaf, np.float64)
        for path, leaf in leaves
        for name in PARAMS
        if f".bases['{name}']" in jax.tree_util.keystr(path)
    }


def dion_twin(config: DionConfig) -> Any:
    """Algorithm 1 of Ahn et al. 2025, for X = W^T [outputs, inputs]."""
    bases = first_bases(config)

    def one(slot: dict[Any, Any], layer: int, name: str, g: np.ndarray) -> np.ndarray:
        q = slot.get(("q", layer), bases[name][layer])
        b = slot.get(("m", layer), 0.0) + g
        p = np.linalg.qr(b @ q)[0]
        r = b.T @ p
        slot["m", layer] = b - (1 - config.momentum) * p @ r.T
        slot["q", layer] = q = r / (np.linalg.norm(r, axis=0) + config.dion_epsilon)
        return math.sqrt(g.shape[0] / g.shape[1]) * p @ q.T

    def twin(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[Any, Any], step: int) -> np.ndarray:
        if param.role != "matrix":
            ratio = config.adam_lr / config.learning_rate
            return other_rate(config, param, p, adam_direction(config, g, slot, step), ratio)
        matrices = enumerate(g.reshape(param.matrix_shape))
        return np.stack([one(slot, layer, param.name, x.T).T for layer, x in matrices]).reshape(param.shape)

    return twin


@pytest.mark.parametrize(
    "config",
    [
        DionConfig(weight_decay=0.1),
        DionConfig(rank_fraction=1.0, momentum=0.8, max_grad_norm=None),
        DionConfig(rank_fraction=0.5, dion_epsilon=0.1),
    ],
)
def test_equals_the_numpy_twin(config: DionConfig) -> None:
    assert_close(run(config), run_twin(config, dion_twin(config)), rtol=2e-4, atol=2e-5)


def test_ranks_are_rounded_up() -> None:
    sides = {name: min(param.matrix_shape[1:]) for name, param in PARAMS.items() if param.role == "matrix"}
    ranks = {name: basis.shape[2] for name, basis in first_bases(DionConfig(rank_fraction=0.3)).items()}
    assert ranks == {name: math.ceil(0.3 * side) for name, side in sides.items()}


def updates_of(config: DionConfig, gradient: np.ndarray, steps: int) -> list[np.ndarray]:
    """The updates of one matrix from the same gradient at each step."""
    param = Param("mlp.up.weight", gradient.shape, ("embed", "mlp"))
    training, weights = Run(config, {param.name: param}), []
    for _ in range(steps):
        before = training.weights()[param.name]
        weights.append(before - training.step({param.name: gradient}, lr=rate(0))[param.name])
    return [np.asarray(x / rate(0) / math.sqrt(gradient.shape[1] / gradient.shape[0])) for x in weights]


def test_the_update_becomes_the_orthogonal_factor_of_a_gradient_of_its_rank() -> None:
    """U V^T of the gradient U S V^T, as Muon's, where the rank of the update suffices."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((size, 2)))[0] for size in (8, 12))
    gradient = ((u * [3.0, 1.0]) @ v.T).astype(np.float32)
    config = DionConfig(rank_fraction=0.25, max_grad_norm=None, weight_decay=0.0)
    np.testing.assert_allclose(updates_of(config, gradient, 20)[-1], u @ v.T, atol=2e-3)


def test_directions_that_are_left_out_are_applied_later() -> None:
    """Updates of rank 1 apply the larger of two directions first and, by error feedback, the smaller one too."""
    gradient = np.zeros((4, 4), np.float32)
    gradient[0, 0], gradient[1, 1] = 1.0, 0.3
    config = DionConfig(rank_fraction=0.25, max_grad_norm=None, weight_decay=0.0, momentum=0.5)
    applied = np.array([np.diag(x)[:2] for x in updates_of(config, gradient, 40)])
    assert applied[5, 0] > 0.9
    assert applied[:, 1].max() > 0.9


CHANGES = {
    "adam_lr": 1e-2,
    "weight_decay": 0.3,
    "momentum": 0.5,
    "rank_fraction": 0.6,
    "dion_epsilon": 1.0,
    "beta1": 0.5,
    "beta2": 0.5,
    "epsilon": 1e-1,
    "max_grad_norm": 0.01,
}


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_every_field_matters(field: str, value: Any) -> None:
    # Clipping changes nothing where every step is rescaled anyway, but for epsilon.
    base = DionConfig(epsilon=1e-2, max_grad_norm=None) if field == "max_grad_norm" else DionConfig()
    assert changes_the_result(base, **{field: value})
