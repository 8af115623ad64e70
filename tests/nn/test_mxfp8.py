"""Products of MXFP8 against the OCP Microscaling specification, written out in NumPy with another's float8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.nn.mxfp8 import Mxfp8Matmul, to_mxfp8
from lm_trainer.parallel.target_platform import compiling_for
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.config.run_config import RunConfig

E4M3, BFLOAT16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
LEAST = -117
"""The least exponent of a scale."""
VOCAB = 61


def twin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of rows [R, K], as numbers, and the exponents of their blocks [R, K / 32]."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2)
    exponents = np.full(largest.shape, LEAST)
    # By trial: the first power of two at which the largest code is no less than the largest number.
    while (short := largest > 448 * 2.0**exponents).any():
        exponents += short
    return (blocks / 2.0 ** exponents[..., None]).astype(E4M3).astype(np.float64).reshape(x.shape), exponents


def rounded(x: np.ndarray) -> np.ndarray:
    """The numbers [R, K] that are multiplied; rows of any length."""
    filled = np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))
    codes, exponents = twin(filled)
    return (codes * np.repeat(2.0**exponents, 32, axis=1))[:, : x.shape[1]]


def every_bfloat16() -> np.ndarray:
    """All that are finite and normal, those of one exponent side by side."""
    codes = np.arange(2**16, dtype=np.uint16)
    exponents = codes >> 7 & 0xFF
    return codes[(exponents > 0) & (exponents < 255)].view(BFLOAT16).reshape(-1, 128)


def of_many_magnitudes(dtype: DTypeLike) -> np.ndarray:
    """Blocks as far apart as float32 has room for, with numbers in them that become subnormal codes and zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 256)) * np.exp2(rng.integers(-90, 100, (400, 1)) - rng.integers(0, 20, (400, 256)))
    x[::7, 32:64] = 0
    x[1::7, 3] = 448 * np.exp2(rng.integers(-9, 9, x[1::7, 3].shape))
    return x.astype(dtype)


rounded_by_us = jax.jit(to_mxfp8)


@pytest.mark.parametrize(
    "x", [every_bfloat16(), of_many_magnitudes(BFLOAT16), of_many_magnitudes(np.float32)], ids=["all", "bf16", "f32"]
)
def test_numbers_are_rounded_as_the_specification_says(x: np.ndarray) -> None:
    codes, exponents = twin(x)
    coded = rounded_by_us(x)
    np.testing.assert_array_equal(np.asarray(coded.scales_RB).view(np.uint8), exponents + 127)
    np.testing.assert_array_equal(np.asarray(coded.codes_RK).astype(np.float64), codes)
    # Not so by chance: codes of all sizes are there, and the largest of each block is one of the larger half.
    assert len(np.unique(codes)) > 200
    assert (np.abs(codes).reshape(len(x), -1, 32).max(axis=2)[exponents > LEAST] > 224 - 1e-9).all()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_block_with_what_is_not_finite_is_none(odd: float) -> None:
    x = np.ones((2, 40), np.float32)
    x[1, 35] = odd
    coded = rounded_by_us(x)
    codes = np.asarray(coded.codes_RK).astype(np.float32)
    assert codes.shape == (2, 64)
    assert np.isnan(codes[1, 32:]).all()
    assert (codes[0, :40] == codes[1, 0]).all()
    assert (codes[0, 40:] == 0).all()


def operands(dtype: DTypeLike = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x of 72 rows, of which the last block is not full, w and an incoming gradient."""
    rng = np.random.default_rng(1)
    x, w, g = (rng.standard_normal(shape) for shape in ((72, 96), (96, 64), (72, 64)))
    return x.astype(dtype), (w / 8).astype(dtype), (g * np.exp2(rng.integers(-12, 1, (72, 1)))).astype(dtype)


def products(backward: bool, dtype: DTypeLike = np.float32) -> list[np.ndarray]:
    """y, dx and dw."""

    @jax.jit
    def all_three(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(Mxfp8Matmul(backward), x, w)
        return (y, *pull(g))

    return [np.asarray(product) for product in all_three(*operands(dtype))]


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 1e-6), (BFLOAT16, 2**-8), (np.float16, 2**-11)])
def test_each_product_has_blocks_along_its_own_sum(dtype: DTypeLike, error: float) -> None:
    x, w, g = operands(dtype)
    expected = [rounded(x) @ rounded(w.T).T, rounded(g) @ rounded(w).T, rounded(x.T) @ rounded(g.T).T]
    for actual, exact in zip(products(True, dtype), expected, strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual.astype(np.float64), exact, rtol=error, atol=error * np.abs(exact).max())


def test_the_gradient_passes_straight_through() -> None:
    x, w, g = operands()
    exact = [x @ w, g @ w.T, x.T @ g]
    errors = {
        backward: [
            np.linalg.norm(actual - one) / np.linalg.norm(one)
            for actual, one in zip(products(backward), exact, strict=True)
        ]
        for backward in (False, True)
    }
    assert errors[False][1:] == pytest.approx([0, 0], abs=1e-6)
    assert all(0.01 < error < 0.06 for error in (errors[False][0], *errors[True]))


def test_devices_that_share_a_sum_have_the_blocks_of_the_whole() -> None:
    x, w, _ = operands()
    unsharded = rounded_by_us(x)
    parts = [rounded_by_us(part) for part in np.split(x, 3, axis=1)]
    for of_whole, of_parts in zip(unsharded, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(
            np.asarray(of_whole).view(np.uint8), np.concatenate(of_parts, axis=1).view(np.uint8)
        )
    matmul = Mxfp8Matmul(backward=True)
    with pytest.raises(
        UserError, match=r"on each device .*24 inputs and 64 outputs; choose multiples of 32.*type: fp8"
    ):
        matmul(jnp.asarray(x[:, :24]), jnp.asarray(w[:24]))


MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 64, "intermediate_dim": 96, "num_layers": 2, "num_heads": 4,
         "num_kv_heads": 2}  # fmt: skip
LINEAR_MAPS = 7


def config_of(model: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {**MODEL, **(model or {})}, "data": {"tokenizer": "bytes"}, "trainer": trainer}
    )


def gradient_of(run: RunConfig) -> Any:
    model, loss = trace_model(run, VOCAB), loss_function(run)
    return model, jax.value_and_grad(lambda params, batch: loss(model.merge(params), batch, None)[0])


def traced(run: RunConfig) -> str:
    model, function = gradient_of(run)
    return str(jax.make_jaxpr(function)(model.shapes, random_batch(2, 16, VOCAB)))


@pytest.mark.parametrize(
    ("remat", "products_of_layer"),
    [(False, 3), (True, 4), pytest.param("dots", 3, marks=pytest.mark.slow), ("dots_no_batch", 3)],
    ids=str,
)
def test_a_product_runs_twice_only_where_it_is_to_be_recomputed(remat: Any, products_of_layer: int) -> None:
    text = traced(config_of({"gradient_checkpointing": remat, "scan_layers": True}, quantization={"type": "mxfp8"}))
    # Nobody asks for the result of a layer's last map again.
    assert text.count(" scaled_dot[") == products_of_layer * LINEAR_MAPS - (remat is True)


def test_the_product_is_that_of_the_platform_that_is_compiled_for() -> None:
    run = config_of({"num_layers": 1}, quantization={"type": "mxfp8"})
    before = traced(run)
    with compiling_for("gpu"):
        for_gpu = traced(run)
    assert "scaled_matmul" in for_gpu
    assert " scaled_dot[" not in for_gpu
    assert "scaled_matmul" not in before
    assert traced(run) == before


@pytest.mark.slow
def test_losses_fall_as_those_of_bfloat16_do() -> None:
    def losses(**trainer: Any) -> np.ndarray:
        run = config_of(mp="p=f32,c=bfloat16", **trainer)
        model, function = gradient_of(run)
        params, batch, step_losses = model.init(), random_batch(8, 16, VOCAB), []

        @jax.jit
        def step(params: Any) -> Any:
            loss, grads = function(params, batch)
            return loss / 128, {name: x - 2e-3 * jnp.sign(grads[name]) for name, x in params.items()}

        for _ in range(60):
            loss, params = step(params)
            step_losses.append(float(loss))
        return np.array(step_losses)

    plain, narrow = losses(), losses(quantization={"type": "mxfp8"})
    assert plain[-1] < 0.5 * plain[0]
    assert (narrow != plain).all()
    np.testing.assert_allclose(narrow, plain, atol=0.02 * plain[0])
