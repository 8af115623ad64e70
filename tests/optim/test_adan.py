"""Adan against a plain NumPy twin of the paper's algorithm 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.optim import AdanConfig, Param
from tests.optim.common import assert_close, changes_the_result, run, run_twin


def twin(config: AdanConfig) -> Any:
    b1, b2, b3 = config.beta1, config.beta2, config.beta3

    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        change = g - slot.get("g", g)
        slot["g"] = g
        slot["m"] = m = b1 * slot.get("m", 0.0) + (1 - b1) * g
        slot["d"] = d = b2 * slot.get("d", 0.0) + (1 - b2) * change
        slot["n"] = n = b3 * slot.get("n", 0.0) + (1 - b3) * (g + (1 - b2) * change) ** 2
        numerator = m / (1 - b1**step) + (1 - b2) * d / (1 - b2**step)
        return numerator / (np.sqrt(n / (1 - b3**step)) + config.epsilon)

    return update


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
