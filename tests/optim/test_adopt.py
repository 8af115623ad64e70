"""ADOPT against a plain NumPy twin of the paper's algorithm 2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.optim import AdoptConfig, Param
from tests.optim.common import FEW, Run, assert_close, changes_the_result, gradients, initial, run, run_twin


def twin(config: AdoptConfig) -> Any:
    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        if step == 1:
            slot["v"], slot["m"] = g * g, np.zeros_like(g)
            return slot["m"]
        normalised = g / np.maximum(np.sqrt(slot["v"]), config.epsilon)
        if config.use_clipping:
            limit = (step - 1) ** 0.25
            normalised = np.clip(normalised, -limit, limit)
        slot["m"] = config.beta1 * slot["m"] + (1 - config.beta1) * normalised
        slot["v"] = config.beta2 * slot["v"] + (1 - config.beta2) * g * g
        return slot["m"]

    return update


@pytest.mark.parametrize("config", [AdoptConfig(), AdoptConfig(beta1=0.5, beta2=0.9, epsilon=0.05, use_clipping=False)])
def test_equals_the_numpy_twin(config: AdoptConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)), rtol=1e-4, atol=1e-5)


def test_the_first_step_only_measures() -> None:
    training = Run(AdoptConfig(weight_decay=0.0), FEW, compiled=False)
    assert_close(training.step(gradients(0, FEW)), initial(FEW), rtol=0, atol=0)
    assert not np.array_equal(training.step(gradients(1, FEW))["embed.tokens"], initial(FEW)["embed.tokens"])


@pytest.mark.parametrize(
    "change",
    [{"beta1": 0.1}, {"beta2": 0.2}, {"epsilon": 0.5}, {"max_grad_norm": 0.1}, {"use_clipping": False}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(AdoptConfig(epsilon=0.1), **change)
