from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from lm_trainer.nn.norm import Norm, make_norm
from lm_trainer.nn.spec import NormSpec
from tests.nn.common import make_init

AXIS = {"embed": 16}
X = (5 + 3 * np.random.default_rng(0).standard_normal((4, 16))).astype(np.float32)


def expected(x: np.ndarray, eps: float, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def test_layer_norm():
    norm = Norm(NormSpec(eps=0.1), AXIS, init=make_init())
    assert norm.bias is not None
    assert norm.scale is not None
    norm.scale[...], norm.bias[...] = jnp.linspace(0.5, 2, 16), jnp.linspace(-1, 1, 16)
    y = expected(X, 0.1, np.linspace(0.5, 2, 16), np.linspace(-1, 1, 16))
    np.testing.assert_allclose(norm(jnp.asarray(X)), y, atol=2e-6)


def test_rms_norm():
    norm = Norm(NormSpec(kind="rms", eps=0.1, bias=False), AXIS, init=make_init())
    assert norm.scale is not None
    norm.scale[...] = jnp.linspace(0.5, 2, 16)
    root = np.sqrt(np.square(X.astype(np.float64)).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(norm(jnp.asarray(X)), X / root * np.linspace(0.5, 2, 16), atol=2e-6)


def test_a_gain_may_be_absent_or_an_offset_to_one():
    plain = Norm(NormSpec(bias=False), AXIS, init=make_init())
    bare = Norm(NormSpec(bias=False, scale=False), AXIS, init=make_init())
    offset = Norm(NormSpec(bias=False, unit_offset=True), AXIS, init=make_init())
    assert bare.scale is None
    assert offset.scale is not None
    for norm in (bare, offset):
        np.testing.assert_array_equal(norm(jnp.asarray(X)), plain(jnp.asarray(X)))
    offset.scale[...] = jnp.full(16, 0.5)
    np.testing.assert_allclose(offset(jnp.asarray(X)), 1.5 * plain(jnp.asarray(X)), rtol=1e-6)


def test_statistics_are_float32_whatever_the_input():
    norm = Norm(NormSpec(bias=False), AXIS, init=make_init())
    x = jnp.asarray(100 + X, jnp.bfloat16)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    # Only the result is rounded: bfloat16 statistics of numbers near 100 would be off by far more.
    exact = expected(np.asarray(x, np.float32), 1e-5, np.ones(16), np.zeros(16))
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-8)


def test_a_factor_multiplies_before_the_result_is_rounded():
    plain, scaled = (Norm(NormSpec(factor=factor), AXIS, init=make_init()) for factor in (None, 1 / 3))
    x = jnp.asarray(X)
    np.testing.assert_allclose(scaled(x), plain(x) / 3, rtol=1e-6)
    once = (np.asarray(plain(x.astype(jnp.bfloat16).astype(jnp.float32))) / 3).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(scaled(x.astype(jnp.bfloat16))), once)


def test_an_absent_norm_is_the_identity():
    x = jnp.asarray(X)
    assert make_norm(None, AXIS, init=make_init())(x) is x
