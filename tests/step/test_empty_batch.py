"""Batches in which no token counts: loss and gradient 0, whatever the optimizer, the step and its penalties."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.optim import AdamConfig, MuonConfig, Optimizer, Param
from lm_trainer.step.updates.update import make_update
from tests.step.test_update import CONFIGS, SMALL, kind

QUICK = (AdamConfig(), MuonConfig())


def drawn(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in SMALL.items()}


ZEROS = {name: np.zeros_like(x) for name, x in drawn(0).items()}


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=kind(c), marks=() if c in QUICK else pytest.mark.slow) for c in CONFIGS],
)
def test_it_is_a_step_whose_gradient_is_zero(config: Optimizer) -> None:
    tx = config.build({name: Param(name, *shape) for name, shape in SMALL.items()})
    update = jax.jit(make_update(config, tx))

    def step(params: Any, state: Any, grads: Any, weight: float, loss: float, *, estimates: bool) -> Any:
        squares = sum(float(np.sum(np.square(x))) for x in grads.values())
        scalars = {"loss": loss, "weight": weight, "squares": squares, "learning_rate": 1e-2}
        curvature = grads if config.curvature is not None and estimates else None
        return update(params, state, grads, curvature, {name: np.float32(x) for name, x in scalars.items()})

    params, state, _ = step(drawn(1), tx.init(drawn(1)), drawn(2), 5.0, 9.0, estimates=True)
    # The first of all, and one after others: sums of 0, with an estimate of curvature that is 0 / 0.
    for initial, held in ((drawn(1), tx.init(drawn(1))), (params, state)):
        empty = step(initial, held, ZEROS, 0.0, 0.0, estimates=True)
        zero = step(initial, held, ZEROS, 1.0, 0.0, estimates=False)
        assert (float(empty[2]["loss"]), float(empty[2]["grad_norm"]), float(empty[2]["tokens"])) == (0, 0, 0)
        assert float(empty[2].get("optim/skipped_steps", 0)) == 0
        for actual, expected in zip(jax.tree.leaves(empty[0]), jax.tree.leaves(zero[0]), strict=True):
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
            assert np.all(np.isfinite(actual))


def test_a_penalty_without_a_loss_moves_nothing() -> None:
    """As of the routers of experts, which is no sum over the tokens that count."""
    config = AdamConfig(weight_decay=0.0, warmup=0)
    tx = config.build({name: Param(name, *shape) for name, shape in SMALL.items()})
    scalars = {"loss": 3.0, "weight": 0.0, "squares": 7.0, "learning_rate": 1e-2}
    params, _, metrics = jax.jit(make_update(config, tx))(
        drawn(1), tx.init(drawn(1)), drawn(2), None, {name: np.float32(x) for name, x in scalars.items()}
    )
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (0, 0)
    for name, x in drawn(1).items():
        np.testing.assert_array_equal(params[name], x)
