"""Multipliers of single parameters: the equations of the papers, and what a factor of the forward pass does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.optim import OPTIMIZERS, AdamConfig, DionConfig, MuonConfig, NorMuonConfig, OptimizerConfig, ScionConfig
from lm_trainer.optim.multipliers import find_multipliers, initial_multiplier
from lm_trainer.optim.params import Multipliers, Param
from tests.optim.common import PARAMS, applied, gradients, initial

FACTORS = {name: 0.5 ** (i % 4) for i, name in enumerate(PARAMS)}
"""A factor of the forward pass for each parameter; powers of two, so that products are exact."""
TRANSFERABLE = [
    config
    for config in (c(max_grad_norm=None, epsilon=1e-3) if "epsilon" in c.model_fields else c() for c in OPTIMIZERS)
    if config.transfer_problem() is None
]


def matrix(inputs: int, outputs: int) -> Param:
    return Param("blocks.0.mlp.up.weight", (3, inputs, outputs), ("layers", "embed", "mlp"))


@pytest.mark.parametrize("config", TRANSFERABLE, ids=[type(c).model_fields["type"].default for c in TRANSFERABLE])
def test_a_factor_of_a_weight_is_the_same_training_as_a_factor_of_the_forward_pass(config: OptimizerConfig) -> None:
    """With f(a W), the gradient of W is a times that of V = a W, and its curvature a^2 times."""
    multiplied = {
        name: dataclasses.replace(param, multipliers=Multipliers(rate=FACTORS[name], epsilon=1 / FACTORS[name]))
        for name, param in PARAMS.items()
    }
    config = config.model_validate({**config.model_dump(), "weight_decay": 0.1})
    plain, folded = config.build(PARAMS), config.build(multiplied)
    weights: Any = {name: jnp.asarray(x) for name, x in initial().items()}
    values: Any = {name: x * FACTORS[name] for name, x in weights.items()}
    state, folded_state = plain.init(weights), folded.init(values)
    for step in range(4):
        grads = gradients(step)
        scaled = {name: g / FACTORS[name] for name, g in grads.items()}
        scalars: Any = {"learning_rate": jnp.float32(0.01), "loss": jnp.float32(1), "grad_norm": jnp.float32(1)}
        more, folded_more = {}, {}
        if config.curvature is not None:
            power = 2 if config.curvature == "hutchinson" else 1
            estimate = {name: abs(g) for name, g in gradients(step + 10).items()}
            more = {"curvature": estimate, "weight": jnp.float32(2)}
            divided = {name: x / FACTORS[name] ** power for name, x in estimate.items()}
            folded_more = {"curvature": divided, "weight": jnp.float32(2)}
        weights, state = applied(plain)(grads, state, weights, **scalars, **more)
        values, folded_state = applied(folded)(scaled, folded_state, values, **scalars, **folded_more)
    for name, x in weights.items():
        assert not np.allclose(x, initial()[name], atol=1e-4), name
        np.testing.assert_allclose(values[name], x * FACTORS[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_input_or_a_table_keeps_its_values_and_rate() -> None:
    for axes, shape, wide in (
        (("vocab", "embed"), (11, 8), (11, 32)),
        (("position", "embed"), (5, 8), (5, 32)),
        (("layers", "embed"), (2, 8), (2, 32)),
    ):
        small, large = Param("embed.tokens", shape, axes), Param("embed.tokens", wide, axes)
        assert initial_multiplier(large, small) == 1
        assert find_multipliers(large, small, AdamConfig()) == Multipliers(rate=1, epsilon=1 / 4)


def test_an_output_has_a_standard_deviation_of_one_over_its_inputs() -> None:
    # Table 8 of arXiv 2203.03466: a multiplier of 1 / fan_in.
    small = Param("head", (11, 8), ("vocab", "embed"))
    large = Param("head", (11, 32), ("vocab", "embed"))
    assert initial_multiplier(large, small) == 1 / 4
    assert find_multipliers(large, small, AdamConfig()) == Multipliers(rate=1 / 4, epsilon=1)
    # A router has a fixed number of outputs too, and so does a map to a latent of fixed size.
    assert initial_multiplier(matrix(32, 6), matrix(8, 6)) == 1 / 4


def test_a_matrix_has_a_standard_deviation_of_one_over_the_root_of_its_inputs() -> None:
    assert initial_multiplier(matrix(32, 128), matrix(8, 32)) == 1 / 2
    # From a latent of fixed size.
    assert initial_multiplier(matrix(8, 128), matrix(8, 32)) == 1
    # Each size by its own ratio.
    assert initial_multiplier(matrix(32, 64), matrix(8, 32)) == pytest.approx(math.sqrt(2 / 4) / 2)
    assert find_multipliers(matrix(32, 64), matrix(8, 32), AdamConfig()) == Multipliers(rate=1 / 4, epsilon=1 / 2)
    deep = find_multipliers(matrix(32, 128), matrix(8, 32), AdamConfig(), depth=2, factor=1 / 2)
    assert deep == Multipliers(rate=1 / 8, epsilon=1 / 4)


@pytest.mark.parametrize("config", [MuonConfig(), MuonConfig(use_kimi_scaling=True), NorMuonConfig(), DionConfig()])
def test_the_spectral_norm_of_an_update_is_the_root_of_outputs_over_inputs(config: OptimizerConfig) -> None:
    """Equation 10 of arXiv 2310.17813, on the updates themselves."""

    def update_norm(inputs: int, outputs: int, rate: float) -> float:
        param = dataclasses.replace(matrix(inputs, outputs), multipliers=Multipliers(rate=rate))
        tx: Any = config.build({param.name: param})
        noise = np.random.default_rng(0).standard_normal(param.shape).astype(np.float32)
        weights: Any = {param.name: jnp.zeros(param.shape)}
        scalars: Any = {"learning_rate": jnp.float32(1), "grad_norm": jnp.float32(1)}
        updates, _ = tx.update({param.name: jnp.asarray(noise)}, tx.init(weights), weights, **scalars)
        return float(np.linalg.norm(np.asarray(updates[param.name])[0], 2))

    base = update_norm(16, 16, 1.0)
    for inputs, outputs in ((64, 64), (64, 16), (16, 64), (64, 32)):
        rate = find_multipliers(matrix(inputs, outputs), matrix(16, 16), config).rate
        expected = math.sqrt(outputs / inputs) * base
        # Newton-Schulz iterations bring singular values only near 1.
        assert update_norm(inputs, outputs, rate) == pytest.approx(expected, rel=0.35)


def test_scion_has_the_same_scale_as_muon() -> None:
    pair = matrix(32, 128), matrix(8, 16)
    assert find_multipliers(*pair, ScionConfig()) == find_multipliers(*pair, MuonConfig())
