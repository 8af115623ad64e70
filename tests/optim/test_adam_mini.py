"""Adam-mini against a plain NumPy twin that goes through the blocks one by one."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.optim import AdamConfig, AdamMiniConfig, Param
from lm_trainer.optim.adam_mini import block_axes
from tests.optim.common import PARAMS, Run, assert_close, changes_the_result, run, run_twin

# Which indices name a block: all others run through it.
BLOCKS = {
    "embed.tokens": ("vocab",),
    "embed.positions": ("position",),
    "stack.blocks.0.attention.q.weight": ("layers", "heads"),
    "stack.blocks.0.attention.out.weight": ("layers", "embed"),
    "stack.blocks.0.mlp.up.weight": ("layers", "mlp"),
    "head.weight": ("vocab",),
}


def block_means(param: Param, squares: np.ndarray) -> np.ndarray:
    result = np.empty_like(squares)
    named = [
        range(n) if axis in BLOCKS[param.name] else [slice(None)]
        for n, axis in zip(param.shape, param.axes, strict=True)
    ]
    for index in itertools.product(*named):
        result[index] = squares[index].mean()
    return result


def twin(config: AdamMiniConfig) -> Any:
    b1, b2 = config.beta1, config.beta2

    def update(param: Param, p: np.ndarray, g: np.ndarray, slot: dict[str, Any], step: int) -> np.ndarray:
        squares = block_means(param, g * g) if param.name in BLOCKS else g * g
        slot["m"] = m = b1 * slot.get("m", 0.0) + (1 - b1) * g
        slot["v"] = v = b2 * slot.get("v", 0.0) + (1 - b2) * squares
        return (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + config.epsilon)

    return update


@pytest.mark.parametrize(
    "config", [AdamMiniConfig(), AdamMiniConfig(beta1=0.8, beta2=0.9, epsilon=0.1, weight_decay=1.0)]
)
def test_equals_the_numpy_twin(config: AdamMiniConfig) -> None:
    assert_close(run(config), run_twin(config, twin(config)))


def test_values_have_a_block_for_each_output() -> None:
    axes = ("layers", "embed", "kv_heads", "head_size")
    assert block_axes(Param("blocks.0.attention.v.weight", (2, 6, 2, 4), axes)) == (1,)
    assert block_axes(Param("blocks.0.attention.k.weight", (2, 6, 2, 4), axes)) == (1, 3)


def test_the_second_moment_takes_hardly_any_memory() -> None:
    def size(state: Any) -> int:
        return sum(x.size for x in jax.tree.leaves(state))

    numbers = sum(int(np.prod(param.shape)) for param in PARAMS.values())
    mini, adam = (Run(config, compiled=False).state for config in (AdamMiniConfig(), AdamConfig()))
    assert size(adam) >= 2 * numbers
    assert size(mini) < 1.4 * numbers


@pytest.mark.parametrize("change", [{"beta1": 0.1}, {"beta2": 0.2}, {"epsilon": 0.5}, {"max_grad_norm": 0.1}])
def test_every_setting_matters(change: dict[str, Any]) -> None:
    assert changes_the_result(AdamMiniConfig(epsilon=0.1), **change)
