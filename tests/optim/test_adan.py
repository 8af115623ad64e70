"""Adan against a NumPy twin that is written from the paper's algorithm 1, in its letters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.optim import AdanConfig, Param
from tests.optim.common import assert_close, changes_the_result, run, run_twin


def twin(config: AdanConfig) -> Any:
    # The paper's betas are the weights of what is new: 0.02, 0.08 and 0.01.
    b1, b2, b3 = 1 - config.beta1, 1 - config.beta2, 1 - config.beta3

    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        change = g - slot.get("g", g)
        slot["g"] = g
        slot["m"] = m = (1 - b1) * slot.get("m", 0.0) + b1 * g
        slot["v"] = v = (1 - b2) * slot.get("v", 0.0) + b2 * change
        slot["n"] = n = (1 - b3) * slot.get("n", 0.0) + b3 * (g + (1 - b2) * change) ** 2
        # From zeros and without their bias, as in the paper's code, where the algorithm begins with the first gradient.
        m, v, n = (x / (1 - (1 - b) ** step) for x, b in ((m, b1), (v, b2), (n, b3)))
        return (m + (1 - b2) * v) / (np.sqrt(n) + config.epsilon)

    return update


def test_two_steps_by_hand() -> None:
    """Gradients 1, then 3: m = 0.0796 / 0.0396, v = 0.16 / 0.1536, n = (0.0099 + 0.01 * 4.84^2) / 0.0199."""
    config = AdanConfig(weight_decay=0, max_grad_norm=None)
    transform: Any = config.transform({})
    state = transform.init({"x": np.zeros(1, np.float32)})
    first, state = transform.update({"x": np.ones(1, np.float32)}, state)
    second, _ = transform.update({"x": np.full(1, 3, np.float32)}, state)
    np.testing.assert_allclose(first["x"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(
        second["x"], (0.0796 / 0.0396 + 0.92 * 0.16 / 0.1536) / (0.244156 / 0.0199) ** 0.5, rtol=1e-5
    )


@pytest.mark.parametrize("config", [AdanConfig(), AdanConfig(beta1=0.9, beta2=0.5, beta3=0.95, epsilon=0.1)])
def test_equals_the_numpy_twin(config: AdanConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"beta1": 0.1}, {"beta2": 0.2}, {"beta3": 0.5}, {"epsilon": 0.5}, {"max_grad_norm": 0.1}, {"weight_decay": 1.0}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(AdanConfig(epsilon=0.1), **change)
