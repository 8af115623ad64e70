"""Lion against a plain NumPy twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_trainer.optim import LionConfig, Param
from tests.optim.common import FEW, Arrays, Run, assert_close, changes_the_result, differs, gradients, run, run_twin


def twin(config: LionConfig) -> Any:
    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        m = slot.get("m", 0.0)
        slot["m"] = config.beta2 * m + (1 - config.beta2) * g
        return np.sign(config.beta1 * m + (1 - config.beta1) * g)

    return update


@pytest.mark.parametrize("config", [LionConfig(), LionConfig(beta1=0.5, beta2=0.99, max_grad_norm=None)])
def test_equals_the_numpy_twin(config: LionConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)))


@pytest.mark.parametrize("change", [{"beta1": 0.1}, {"beta2": 0.2}, {"weight_decay": 0.0}])
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(LionConfig(), **change)


def test_a_clipped_gradient_counts_less_in_the_momentum() -> None:
    def weights_after(max_norm: float | None) -> Arrays:
        training = Run(LionConfig(max_grad_norm=max_norm), FEW, compiled=False)
        training.step({name: 100 * g for name, g in gradients(0, FEW).items()})
        return training.step(gradients(1, FEW))

    assert differs(weights_after(1.0), weights_after(None))
