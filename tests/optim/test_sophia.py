"""Sophia against a plain NumPy twin and against optax.contrib.sophia."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.optim import Param
from lm_trainer.optim.sophia import SophiaConfig, SophiaGConfig, SophiaHConfig
from tests.compiling import quick_jit
from tests.optim.common import (
    FEW,
    PARAMS,
    Arrays,
    applied,
    assert_close,
    differs,
    gradients,
    initial,
    norm,
    rate,
    run_twin,
)

WEIGHT = 50.0
STEPS = 25


def estimate(step: int) -> Arrays:
    """Sums over a batch, of both signs."""
    # Seeds that no gradient has, so that estimate and gradient are independent.
    return {name: 10 * x for name, x in gradients(1000 + step).items()}


def run(
    config: SophiaConfig, params: Mapping[str, Param] = PARAMS, *, steps: int = STEPS, curvature: Any = estimate
) -> Arrays:
    tx = config.build(params)
    weights: Any = initial(params)
    state, update = quick_jit(tx.init)(weights), quick_jit(applied(tx))
    for step in range(steps):
        grads = gradients(step, params)
        extra_args = {"learning_rate": rate(step), "grad_norm": norm(grads), "weight": WEIGHT}
        scalars = {name: np.float32(x) for name, x in extra_args.items()}
        sums = None
        if step % config.curvature_interval == 0:
            sums = {name: x for name, x in curvature(step).items() if name in params}
        weights, state = update(grads, state, weights, curvature=sums, **scalars)
    return {name: np.asarray(x) for name, x in weights.items()}


def twin(config: SophiaConfig) -> Any:
    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        m = slot["m"] = config.beta1 * slot.get("m", 0) + (1 - config.beta1) * g
        if (step - 1) % config.update_interval == 0:
            sums = estimate(step - 1)[param.name].astype(np.float64)
            diagonal = (sums if isinstance(config, SophiaHConfig) else sums**2) / WEIGHT
            slot["h"] = config.beta2 * slot.get("h", 0) + (1 - config.beta2) * diagonal
        u = m / (1 - config.beta1**step) / np.maximum(config.gamma * slot["h"], config.epsilon)
        return u if config.clip_threshold is None else np.clip(u, -config.clip_threshold, config.clip_threshold)

    return update


@pytest.mark.parametrize(
    "config",
    [
        SophiaHConfig(gamma=50.0),
        SophiaGConfig(gamma=20.0, beta1=0.8, beta2=0.9, update_interval=3, weight_decay=0.0, max_grad_norm=None),
        SophiaGConfig(gamma=20.0, clip_threshold=None, epsilon=0.2),
    ],
)
def test_equals_the_numpy_twin(config: SophiaConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)), rtol=1e-4, atol=2e-5)


def test_equals_optax() -> None:
    """There an estimate counts from the next step on, so ours is given one step later."""
    config = SophiaHConfig(gamma=50.0, update_interval=1, max_grad_norm=None, weight_decay=0.0)

    def pass_on(sums: Any, state: Any, params: Any = None, *, diagonal: Any, **_: Any) -> tuple[Any, Any]:
        return diagonal, state

    source = optax.GradientTransformationExtraArgs(optax.init_empty_state, pass_on)  # pyright: ignore[reportArgumentType]
    tx = optax.contrib.sophia(1.0, 0.96, 0.99, 1e-12, 0.0, None, 50.0, update_interval=1, hessian_diagonal_fn=source)
    params: Any = {name: jnp.asarray(x) for name, x in initial().items()}
    state, update = tx.init(params), quick_jit(tx.update)
    for step in range(20):
        diagonal = jax.tree.map(lambda x: x / WEIGHT, estimate(step + 1))
        updates, state = update(gradients(step), state, params, diagonal=diagonal)
        params = optax.apply_updates(params, optax.tree.scale(rate(step), updates))
    nothing_first = lambda step: jax.tree.map(np.zeros_like, estimate(0)) if step == 0 else estimate(step)  # noqa: E731
    assert_close(run(config, steps=20, curvature=nothing_first), params, rtol=1e-4, atol=2e-5)


CHANGES = {
    "beta1": 0.5,
    "beta2": 0.5,
    "epsilon": 0.5,
    "clip_threshold": None,
    "gamma": 5.0,
    "update_interval": 2,
    "weight_decay": 0.5,
    "max_grad_norm": 0.1,
}


BASE = SophiaGConfig(gamma=20.0, epsilon=0.1)


@functools.cache
def baseline() -> Arrays:
    return run(BASE, FEW, steps=4)


@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_every_field_matters(field: str, value: Any) -> None:
    assert differs(baseline(), run(BASE.model_validate({**BASE.model_dump(), field: value}), FEW, steps=4))


def test_the_kind_of_estimate_and_its_interval_are_said() -> None:
    assert (SophiaHConfig().curvature, SophiaHConfig().curvature_interval) == ("hutchinson", 10)
    assert (SophiaGConfig(update_interval=4).curvature, SophiaGConfig().gamma) == ("gauss_newton_bartlett", 0.05)
    assert SophiaGConfig(update_interval=4).curvature_interval == 4
    assert SophiaHConfig().elementwise


def test_an_estimate_that_is_not_finite_leaves_no_trace() -> None:
    config = SophiaGConfig(gamma=20.0)
    broken = lambda step: {**estimate(step), "head.weight": np.full(PARAMS["head.weight"].shape, np.inf)}  # noqa: E731
    weights = run(config, steps=3, curvature=broken)
    assert all(np.all(np.isfinite(x)) for x in weights.values())


def test_a_quadratic_is_solved_in_one_step_where_nothing_is_clipped() -> None:
    """With gamma 1 and no averaging Sophia is Newton's method on the diagonal."""
    config = SophiaHConfig(gamma=1.0, beta1=0.0, beta2=0.0, clip_threshold=None, weight_decay=0.0, max_grad_norm=None)
    param = Param("w", (3,), ("embed",))
    tx = config.build({"w": param})
    h, w, target = np.array([[1, 10, 1000], [1, -2, 3], [0.5, 0.25, -1]], np.float32)
    updates: Any = tx.update(
        {"w": h * (w - target)},
        tx.init({"w": w}),
        {"w": w},
        curvature={"w": h * WEIGHT},
        weight=jnp.float32(WEIGHT),
        learning_rate=jnp.float32(1),
        grad_norm=jnp.float32(1),
    )[0]
    np.testing.assert_allclose(w + np.asarray(updates["w"]), target, rtol=1e-5)
