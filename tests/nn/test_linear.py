from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.nn.linear import ACTIVATIONS, Linear, dropout
from lm_trainer.nn.mlp import Xielu, make_activation
from lm_trainer.nn.spec import XieluSpec
from tests.nn.common import make_init, weight_of

X = np.linspace(-4, 4, 41, dtype=np.float32)
NORMAL_CDF = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in X])
TANH_CDF = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
EXPECTED = {
    "gelu": X * NORMAL_CDF,
    "gelu_new": X * TANH_CDF,
    "quick_gelu": X / (1 + np.exp(-1.702 * X)),
    "relu": np.maximum(X, 0),
    "silu": X / (1 + np.exp(-X)),
    "tanh": np.tanh(X),
    "relu2": np.maximum(X, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(X)), EXPECTED[name], rtol=1e-6, atol=2e-6)


def test_xielu():
    xielu = make_activation(XieluSpec(), init=make_init())
    assert isinstance(xielu, Xielu)
    plus, minus, far = np.maximum(X, 0), np.minimum(X, 0), np.array([-200.0, 100.0], np.float32)
    # Both curvatures are 0.8 at first.
    fresh = 0.8 * plus**2 + 0.8 * (np.expm1(minus) - minus) + 0.5 * X
    np.testing.assert_allclose(xielu(jnp.asarray(X)), fresh, atol=2e-6)
    xielu.alpha_p[...], xielu.alpha_n[...] = jnp.full(1, 0.3), jnp.full(1, -0.7)
    a, b = np.log1p(np.exp(0.3)), 0.5 + np.log1p(np.exp(-0.7))
    expected = a * plus**2 + b * (np.expm1(minus) - minus) + 0.5 * X
    np.testing.assert_allclose(xielu(jnp.asarray(X)), expected, atol=4e-6)
    slopes = jax.vmap(jax.grad(lambda x: xielu(x)))
    np.testing.assert_allclose(slopes(jnp.asarray(X)), 2 * a * plus + b * np.expm1(minus) + 0.5, atol=4e-6)
    np.testing.assert_allclose(slopes(jnp.asarray(far)), [0.5 - b, 200 * a + 0.5], rtol=1e-5)
    assert xielu(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


def test_linear_contracts_its_trailing_inputs():
    linear = Linear({"a": 2, "b": 3}, {"c": 4, "d": 5}, bias=True, init=make_init())
    assert linear.bias is not None
    linear.bias[...] = jnp.arange(20.0).reshape(4, 5)
    x = np.random.default_rng(0).standard_normal((6, 7, 2, 3), np.float32)
    expected = np.einsum("xyab,abcd->xycd", x, weight_of(linear)[...]) + np.asarray(linear.bias[...])
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)
    assert weight_of(linear).get_metadata("logical_axes") == ("a", "b", "c", "d")
    assert linear.bias.get_metadata("logical_axes") == ("c", "d")
    assert linear(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_dropout_keeps_the_mean_and_zeroes_the_rate():
    x = jnp.ones((200, 200))
    y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.01
    assert abs(y.mean() - 1) < 0.015
    assert (np.asarray(dropout(x, 0.25, jax.random.key(1))) != y).any()
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
