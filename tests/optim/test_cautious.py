"""Cautious AdamW against a plain NumPy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.optim import CautiousConfig, Param
from tests.optim.common import assert_close, changes_the_result, run, run_twin


def twin(config: CautiousConfig) -> Any:
    b1, b2 = config.beta1, config.beta2

    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        slot["m"] = m = b1 * slot.get("m", 0.0) + (1 - b1) * g
        slot["v"] = v = b2 * slot.get("v", 0.0) + (1 - b2) * g * g
        u = (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + config.epsilon)
        layers = list(zip(u, g, strict=True)) if param.axes[0] == "layers" else [(u, g)]
        masked = [np.where(a * b > 0, a, 0.0) / max(np.mean(a * b > 0), 1e-3) for a, b in layers]
        return np.stack(masked).reshape(u.shape)

    return update


@pytest.mark.parametrize("config", [CautiousConfig(), CautiousConfig(beta1=0.8, beta2=0.9, epsilon=0.1)])
def test_equals_the_numpy_twin(config: CautiousConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)))


@pytest.mark.parametrize("change", [{"beta1": 0.1}, {"beta2": 0.2}, {"epsilon": 0.5}, {"max_grad_norm": 0.1}])
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(CautiousConfig(epsilon=0.1), **change)
