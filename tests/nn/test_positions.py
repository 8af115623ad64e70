from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from lm_trainer.nn.positions import alibi_slopes, apply_rope, rope_frequencies
from lm_trainer.nn.rope_spec import LinearScaling, RopeSpec, WavelengthScaling, YarnScaling
from lm_trainer.nn.spec import AlibiSpec
from lm_trainer.parallel.target_platform import compiling_for

X = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
POSITIONS = np.array([[0, 1, 2, 0, 1], [7, 100, 5000, 3, 90]], np.int32)


def test_rotation_of_complex_numbers():
    angles = POSITIONS[..., None, None] * 100.0 ** (-np.arange(4) / 4)
    turned = (X[..., :4] + 1j * X[..., 4:]) * np.exp(1j * angles)
    actual = apply_rope(RopeSpec(100.0), jnp.asarray(X), jnp.asarray(POSITIONS))
    # Position 5000 is an angle of 5000 radians, where float32 has steps of 5e-4.
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], -1), atol=2e-3)
    np.testing.assert_allclose(actual[0], np.concatenate([turned.real, turned.imag], -1)[0], atol=1e-6)


def test_coordinates_of_a_rotation_may_be_adjacent():
    halves = np.concatenate([X[..., ::2], X[..., 1::2]], axis=-1)
    expected = np.asarray(apply_rope(RopeSpec(100.0), jnp.asarray(halves), jnp.asarray(POSITIONS)))
    actual = np.asarray(apply_rope(RopeSpec(100.0, interleaved=True), jnp.asarray(X), jnp.asarray(POSITIONS)))
    np.testing.assert_array_equal(actual[..., ::2], expected[..., :4])
    np.testing.assert_array_equal(actual[..., 1::2], expected[..., 4:])


def test_a_rotation_backwards_undoes_one():
    turned = apply_rope(RopeSpec(100.0), jnp.asarray(X), jnp.asarray(POSITIONS))
    back = apply_rope(RopeSpec(100.0, backward=True), turned, jnp.asarray(POSITIONS))
    np.testing.assert_allclose(back, X, atol=1e-5)
    assert np.abs(np.asarray(turned) - X).max() > 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [
        RopeSpec(100.0),
        RopeSpec(fraction=0.5, scaling=YarnScaling(8.0, 16, 32.0, 1.0, 1.2)),
        RopeSpec(fraction=0.5, interleaved=True),
    ],
)
def test_a_tpu_rotates_by_a_product_to_the_same_numbers(spec: RopeSpec, dtype: DTypeLike):
    def rotated(x: jax.Array) -> jax.Array:
        return apply_rope(spec, x, jnp.asarray(POSITIONS))

    halves, derivative = jax.vjp(rotated, jnp.asarray(X, dtype))
    with compiling_for("tpu"):
        product, of_product = jax.vjp(rotated, jnp.asarray(X, dtype))
    np.testing.assert_array_equal(np.asarray(product, np.float32), np.asarray(halves, np.float32))
    actual, expected = (np.asarray(back(halves)[0], np.float32) for back in (of_product, derivative))
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)


def test_products_depend_on_distances_alone():
    q, k = X[:1, :1], X[1:, :1]

    def product(a: int, b: int) -> np.ndarray:
        left, right = (
            apply_rope(RopeSpec(), jnp.asarray(x), jnp.full((1, 1), position)) for x, position in ((q, a), (k, b))
        )
        return np.sum(np.asarray(left) * np.asarray(right), axis=-1)

    np.testing.assert_allclose(product(9, 4), product(105, 100), atol=1e-5)
    assert np.abs(product(9, 4) - product(9, 5)).max() > 1e-2


def test_a_fraction_leaves_the_rest_alone():
    for interleaved in (False, True):
        spec = RopeSpec(fraction=0.5, interleaved=interleaved)
        partial = np.asarray(apply_rope(spec, jnp.asarray(X), jnp.asarray(POSITIONS)))
        np.testing.assert_array_equal(partial[..., 4:], X[..., 4:])
        whole = RopeSpec(interleaved=interleaved)
        rotated_half = apply_rope(whole, jnp.asarray(X[..., :4]), jnp.asarray(POSITIONS))
        np.testing.assert_array_equal(partial[..., :4], rotated_half)


def test_scalings():
    plain, _ = rope_frequencies(RopeSpec(), 64)
    np.testing.assert_allclose(plain, 10_000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(RopeSpec(scaling=LinearScaling(4.0)), 64)[0], plain / 4, rtol=1e-6)
    by_length = rope_frequencies(RopeSpec(scaling=WavelengthScaling(8.0, 1.0, 4.0, 1024)), 64)[0]
    wavelengths = 2 * math.pi / plain
    np.testing.assert_allclose(by_length[wavelengths > 1024], plain[wavelengths > 1024] / 8, rtol=1e-6)
    np.testing.assert_allclose(by_length[wavelengths < 256], plain[wavelengths < 256], rtol=1e-6)
    assert (np.diff(by_length) < 0).all()
    yarn, magnitude = rope_frequencies(RopeSpec(scaling=YarnScaling(8.0, 1024, 32.0, 1.0, 1.2)), 64)
    turns = 1024 / wavelengths
    # The ramp goes from 32 turns to 1, and both ends are rounded outwards to whole dimensions.
    np.testing.assert_allclose(yarn[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(yarn[turns < 0.8], plain[turns < 0.8] / 8, rtol=1e-6)
    assert magnitude == 1.2


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (4, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]),
        (3, [2.0**-4, 2.0**-8, 2.0**-2]),
    ],
)
def test_slopes(heads, slopes):
    """Those of Press et al. 2022."""
    np.testing.assert_allclose(alibi_slopes(AlibiSpec(), heads), slopes)
