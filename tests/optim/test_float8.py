"""Optimizer state in 8 bits: the numbers that codes stand for, rounding, and what it does to training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from lm_trainer.core.block_float import SIGNED, UNSIGNED, BlockFloats, Blocks, Format, block_exponents, decode, encode
from lm_trainer.optim import (
    OPTIMIZERS,
    AdamConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    Param,
    ScheduleFreeConfig,
)
from tests.optim.common import Arrays, Run, check_resumed, gradients, initial, run

ABLE = [member for member in OPTIMIZERS if member.squares_in_state is not None]
PARAMS = {
    name: Param(name, shape, axes)
    for name, shape, axes in (
        ("embed.tokens", (161, 40), ("vocab", "embed")),
        ("blocks.0.up.weight", (2, 64, 96), ("layers", "embed", "mlp")),
        ("blocks.0.small.weight", (2, 8, 12), ("layers", "embed", "mlp")),
        ("final_norm.scale", (40,), ("embed",)),
    )
}
LARGE = ("embed.tokens", "blocks.0.up.weight")
EVERY = np.arange(256, dtype=np.uint8)
NUMBERS = {
    SIGNED: EVERY.view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    # A float16 has 5 bits of exponent and 10 of mantissa, of which the last 7 are left out.
    UNSIGNED: (EVERY.astype(np.uint16) << 7).view(np.float16).astype(np.float64),
}
"""The number of each code, by those who know the formats from elsewhere."""
GRIDS = {
    SIGNED: np.unique(NUMBERS[SIGNED][np.isfinite(NUMBERS[SIGNED])]),
    UNSIGNED: NUMBERS[UNSIGNED][: 31 << 3],
}
"""The finite numbers, in their order. The largest exponent of a float16 is for infinities."""
BLOCKS = Blocks(1, 32)


@functools.partial(jax.jit, static_argnames=("form", "blocks"))
def coded_and_decoded(x: Any, form: Format, blocks: Blocks, chance: Any) -> tuple[BlockFloats, jax.Array]:
    """The codes of numbers, and the numbers decoded from them."""
    coded = encode(x, block_exponents(x, form, blocks), form, blocks, chance)
    return coded, decode(coded, form, blocks)


def rounded(x: np.ndarray, form: Format, blocks: Blocks, chance: Any) -> np.ndarray:
    return np.asarray(coded_and_decoded(x, form, blocks, chance)[1])


def values(form: Format, scale: float, shape: tuple[int, ...] = (3, 70, 5)) -> np.ndarray:
    """Numbers of many magnitudes, with a block of zeros."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 1, shape) * scale).astype(np.float32)
    x[0, :32, 1] = 0
    return x if form.signed else abs(x)


def powers(coded: BlockFloats, form: Format, length: int) -> np.ndarray:
    """The power of two of each number's block, written out place by place."""
    shared = np.asarray(coded.block_exponents, np.float64)
    return 2.0 ** (shared[:, np.arange(length) // BLOCKS.size] - 127 - form.highest)


@pytest.mark.parametrize("form", [SIGNED, UNSIGNED], ids=("signed", "unsigned"))
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 1e-37])
def test_a_number_becomes_one_of_the_two_codes_around_it(form: Format, scale: float) -> None:
    x = values(form, scale)
    chance = np.random.default_rng(1).integers(0, 1 << 16, x.shape).astype(np.uint16)
    coded, decoded = coded_and_decoded(x, form, BLOCKS, chance)
    power, grid = powers(coded, form, x.shape[1]), GRIDS[form]
    scaled = x / power
    assert np.abs(scaled).max() <= grid[-1], "a block's largest number is within the format"
    code_values = NUMBERS[form][np.asarray(coded.codes)]
    below = grid[np.searchsorted(grid, scaled, side="right") - 1]
    above = grid[np.searchsorted(grid, scaled, side="left")]
    # The least code stands for squares that are below it.
    raised = (not form.signed) & (scaled > 0) & (scaled < grid[1]) & (code_values == grid[1])
    assert ((code_values == below) | (code_values == above) | raised).all()
    np.testing.assert_array_equal(np.asarray(decoded, np.float64), code_values * power)


@pytest.mark.parametrize("form", [SIGNED, UNSIGNED], ids=("signed", "unsigned"))
@pytest.mark.parametrize("x", [1.01, 0.37, 3e-3, 7e-5])
def test_the_mean_of_what_is_rounded_is_exact(form: Format, x: float) -> None:
    drawn = np.full((1, 200_000, 1), x, np.float32)
    drawn[:, ::32] = 1.9
    chance = jax.random.bits(jax.random.key(3), drawn.shape, jnp.uint16)
    rounded_values = rounded(drawn, form, BLOCKS, chance).astype(np.float64)[0, np.arange(200_000) % 32 != 0]
    assert len(np.unique(rounded_values)) == 2
    assert rounded_values.mean() == pytest.approx(
        float(np.float32(x)), abs=4e-3 * (rounded_values.max() - rounded_values.min())
    )


def test_what_has_a_code_stays_as_it_is_and_what_is_not_finite_becomes_nan() -> None:
    for form, grid in GRIDS.items():
        x = np.append(grid, [np.inf, np.nan]).astype(np.float32)[None, :, None]
        chance = np.random.default_rng(0).integers(0, 1 << 16, x.shape).astype(np.uint16)
        rounded_values = rounded(x, form, Blocks(1, x.shape[1]), chance)
        np.testing.assert_array_equal(rounded_values[0, :, 0], np.append(grid, [np.nan, np.nan]).astype(np.float32))


@pytest.mark.parametrize("least", [1e-12, 1e-30, 1e-38, 1e-44])
def test_no_square_but_0_is_rounded_to_0(least: float) -> None:
    for largest in (1e30, 1.0, 1e-30, least):
        x = np.full((1, 64, 1), least, np.float32)
        x[0, 5:7, 0] = largest, 0.0
        rounded_values = rounded(x, UNSIGNED, BLOCKS, np.zeros(x.shape, np.uint16))
        assert rounded_values[0, 6, 0] == 0
        assert (np.delete(rounded_values[0, :, 0], 6) >= np.finfo(np.float32).tiny).all()


def flat(weights: Arrays) -> np.ndarray:
    return np.concatenate([weights[name].ravel() for name in LARGE])


def in_8_bits(config: OptimizerConfig) -> Any:
    return config.model_validate({**config.model_dump(), "state_dtype": "float8"})


@pytest.mark.parametrize("config", [AdamConfig(), LionConfig(), MuonConfig()], ids=lambda c: c.type)
def test_weights_stay_near_those_of_full_precision(config: OptimizerConfig) -> None:
    exact, coded = run(config, PARAMS), run(in_8_bits(config), PARAMS)
    assert np.mean(np.abs(flat(coded) - flat(exact))) < 0.1 * np.mean(np.abs(flat(exact) - flat(initial(PARAMS))))
    assert (flat(coded) != flat(exact)).any()


def test_small_weights_and_vectors_keep_their_digits() -> None:
    exact, coded = run(AdamConfig(), PARAMS), run(in_8_bits(AdamConfig()), PARAMS)
    for name, x in exact.items():
        assert (coded[name] != x).any() == (name in LARGE), name


@pytest.mark.parametrize("member", ABLE, ids=lambda m: m().type)
def test_arrays_like_large_weights_take_a_byte_and_one_for_each_block(member: type[OptimizerConfig]) -> None:
    like = {name: jax.ShapeDtypeStruct(param.shape, jnp.float32) for name, param in PARAMS.items()}

    def arrays(**fields: Any) -> list[Any]:
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(member(**fields).build(PARAMS).init, like))
        return [(path, x) for path, x in leaves if any(f"['{name}']" in jax.tree_util.keystr(path) for name in LARGE)]

    shapes = {PARAMS[name].shape for name in LARGE}
    num_elements = sum(x.size for _, x in arrays() if x.shape in shapes)
    low = [(path[-1].name, x) for path, x in arrays(state_dtype="float8") if x.dtype == jnp.uint8]
    assert sum(x.size for name, x in low if name == "codes") == num_elements
    assert num_elements / 32 <= sum(x.size for name, x in low if name == "block_exponents") < num_elements / 7
    assert not [x for _, x in arrays(state_dtype="float8") if x.dtype != jnp.uint8 and x.shape in shapes]


def test_the_first_state_is_not_computed_by_the_compiler() -> None:
    """XLA's evaluation of constants takes a minute for 10 million elements."""
    like = {name: jax.ShapeDtypeStruct(param.shape, jnp.float32) for name, param in PARAMS.items()}
    compiled = jax.jit(in_8_bits(AdamConfig()).build(PARAMS).init).lower(like).compile()
    # The largest value of each block, in both averages of each large weight.
    assert (compiled.as_text() or "").count(" reduce(") >= 2 * len(LARGE)


@pytest.mark.parametrize("member", ABLE, ids=lambda m: m().type)
def test_every_field_of_squares_is_one_of_the_state(member: type[OptimizerConfig]) -> None:
    training = Run(member(max_grad_norm=None), PARAMS, compiled=False)
    for field in member.squares_in_state or ():
        assert optax.tree_utils.tree_get_all_with_path(training.state, field), field
    for step in range(3):
        training.step(gradients(step, PARAMS))
    never = {path[-2].name for path, x in like_large_weights(training.state) if (x >= 0).all()}
    assert set(member.squares_in_state or ()) == never, "what is never negative is a square"


def like_large_weights(state: Any) -> list[Any]:
    shapes = {PARAMS[name].shape for name in LARGE}
    return [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(state) if x.shape in shapes]


@pytest.mark.slow
def test_an_average_that_moves_slowly_arrives() -> None:
    """Rounded to the nearest, the average of squares would stop: a step of 0.001 of it is too small."""
    config = AdamConfig(beta2=0.999, state_dtype="float8", weight_decay=0, max_grad_norm=None)
    param = Param("blocks.0.up.weight", (1, 64, 72), ("layers", "embed", "mlp"))
    training = Run(config, {param.name: param})
    training.repeat({param.name: np.full(param.shape, 0.5, np.float32)}, 3000)
    nu = training.state.inner[1][0].nu[param.name]
    average = np.asarray(decode(nu, UNSIGNED, Blocks(1, 8)), np.float64)
    assert average.mean() == pytest.approx(0.25 * (1 - 0.999**3000), rel=0.01)


def test_steps_do_not_depend_on_the_process_that_takes_them() -> None:
    check_resumed(AdamConfig(state_dtype="float8"), PARAMS)


@pytest.mark.parametrize("member", [m for m in OPTIMIZERS if m.squares_in_state is None], ids=lambda m: m().type)
def test_an_optimizer_that_cannot_says_who_can(member: type[OptimizerConfig]) -> None:
    with pytest.raises(ValidationError) as refused:
        member(state_dtype="float8")
    if member is ScheduleFreeConfig:
        assert "state holds weights, which float8 would spoil" in str(refused.value)
    else:
        assert f"one of {', '.join(sorted(able.model_fields['type'].default for able in ABLE))} for float8" in str(
            refused.value
        )
