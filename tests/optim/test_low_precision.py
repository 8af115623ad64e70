"""Optimizer state in bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.optim import OPTIMIZERS, AdamConfig, LionConfig, MuonConfig, OptimizerConfig, ScheduleFreeConfig
from lm_trainer.optim.low_precision import round_stochastically
from tests.optim.common import FEW, Arrays, Run, check_resumed, initial, run


def flat(weights: Arrays) -> np.ndarray:
    return np.concatenate([x.ravel() for x in weights.values()])


def bfloat16_around(x: float) -> tuple[float, float]:
    """The nearest values on both sides that have 8 digits of mantissa, by arithmetic alone."""
    digit = 2.0 ** (np.floor(np.log2(abs(x))) - 7)
    return float(np.floor(x / digit) * digit), float(np.ceil(x / digit) * digit)


rounded_by_chance = jax.jit(round_stochastically)


@pytest.mark.parametrize("x", [1.001, -3.1415926, 1.7e-30, 6.25e20, 0.007])
def test_rounding_takes_the_values_around_with_the_exact_one_as_mean(x: float) -> None:
    exact = float(np.float32(x))
    low, high = bfloat16_around(exact)
    rounded = np.asarray(rounded_by_chance(np.full(200_000, exact, np.float32), jax.random.key(3)), np.float64)
    assert set(rounded) == {low, high}
    assert (rounded.mean() - low) / (high - low) == pytest.approx((exact - low) / (high - low), abs=5e-3)


def test_what_needs_no_rounding_or_is_not_finite_stays() -> None:
    values = np.array([0.0, -0.0, 1.0, -1.5, 384.0, np.inf, -np.inf], np.float32)
    rounded = np.asarray(rounded_by_chance(values, jax.random.key(0)), np.float32)
    np.testing.assert_array_equal(rounded, values)
    assert np.isnan(float(rounded_by_chance(np.float32(np.nan), jax.random.key(0))))


@pytest.mark.slow
def test_an_average_that_moves_slowly_arrives() -> None:
    """Rounded to the nearest, the average of squares would stop at a quarter: a step of 0.001 of it is too small."""
    training = Run(AdamConfig(beta2=0.999, state_dtype="bfloat16", weight_decay=0, max_grad_norm=None), FEW)
    grads = {name: np.full(param.shape, 0.5, np.float32) for name, param in FEW.items()}
    training.repeat(grads, 3000)
    nu = np.concatenate([np.asarray(x, np.float64).ravel() for x in training.state.inner[1][0].nu.values()])
    assert nu.mean() == pytest.approx(0.25 * (1 - 0.999**3000), rel=0.01)


@pytest.mark.parametrize("config", [AdamConfig(), LionConfig(), MuonConfig()], ids=lambda c: c.type)
def test_weights_stay_near_those_of_full_precision(config: OptimizerConfig) -> None:
    low = config.model_validate({**config.model_dump(), "state_dtype": "bfloat16"})
    exact, rounded = run(config, FEW), run(low, FEW)
    # A sign that turns moves a weight of Lion by twice the learning rate, so single weights may part.
    assert np.mean(np.abs(flat(rounded) - flat(exact))) < 0.02 * np.mean(np.abs(flat(exact) - flat(initial(FEW))))
    assert any((rounded[name] != exact[name]).any() for name in FEW)


@pytest.mark.parametrize("member", [m for m in OPTIMIZERS if not m.weights_in_state], ids=lambda m: m().type)
def test_arrays_like_parameters_take_half_the_memory(member: type[OptimizerConfig]) -> None:
    shapes = {param.shape for param in FEW.values()}

    def state_size(**fields: Any) -> int:
        state = jax.eval_shape(
            member(**fields).build(FEW).init, {n: jax.ShapeDtypeStruct(p.shape, jnp.float32) for n, p in FEW.items()}
        )
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.shape in shapes)

    assert state_size(state_dtype="bfloat16") * 2 == state_size()


def test_steps_do_not_depend_on_the_process_that_takes_them() -> None:
    check_resumed(AdamConfig(state_dtype="bfloat16"), FEW)


def test_weights_in_the_state_are_not_rounded() -> None:
    with pytest.raises(ValidationError, match=r"state holds weights.*remove state_dtype"):
        ScheduleFreeConfig(state_dtype="bfloat16")
