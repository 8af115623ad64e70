"""RMSProp with momentum against a plain NumPy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from lm_trainer.optim import AnyOptimizer, Param, RmsPropConfig
from tests.optim.common import Run, assert_close, changes_the_result, initial, run, run_twin


def twin(config: RmsPropConfig) -> Any:
    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        b1, b2 = config.beta1, config.beta2
        slot["v"] = v = b2 * slot.get("v", 0.0) + (1 - b2) * g * g
        normalised = g / (np.sqrt(v / (1 - b2**step)) + config.epsilon)
        slot["m"] = m = b1 * slot.get("m", 0.0) + (1 - b1) * normalised
        return m / (1 - b1**step)

    return update


@pytest.mark.parametrize("config", [RmsPropConfig(), RmsPropConfig(beta1=0.5, beta2=0.9, epsilon=0.1)])
def test_equals_the_numpy_twin(config: RmsPropConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)))


@pytest.mark.parametrize("change", [{"beta1": 0.1}, {"beta2": 0.2}, {"epsilon": 0.5}, {"max_grad_norm": 0.1}])
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(RmsPropConfig(epsilon=0.1), **change)


def test_a_gradient_of_zero_changes_nothing() -> None:
    config = RmsPropConfig(weight_decay=0.0)
    training = Run(config, compiled=False)
    after = training.step({name: np.zeros_like(x) for name, x in initial().items()})
    assert_close(after, initial(), rtol=0, atol=0)


def test_it_is_selected_by_type() -> None:
    config = TypeAdapter(AnyOptimizer).validate_python({"type": "rmsprop", "beta1": 0.8})
    assert isinstance(config, RmsPropConfig)
    assert config.beta1 == 0.8
