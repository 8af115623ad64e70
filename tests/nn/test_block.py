from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.nn.block import Block
from lm_trainer.nn.mlp import Mlp
from lm_trainer.nn.spec import BlockSpec, NormSpec
from tests.nn.common import BLOCK, built, context, make_init, weight_of

S = 6
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, S, 16)), jnp.float32)
CONTEXT = context(np.zeros((2, S), np.int32))


def build(spec: BlockSpec) -> Block:
    return built(lambda: Block(spec, 16, init=make_init(0.3)))


def mlp(block: Block) -> Mlp:
    assert isinstance(block.mlp, Mlp)
    return block.mlp


def layer_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def test_wiring_with_norms_before_after_or_nowhere():
    for pre in (None, NormSpec()):
        for post in (None, NormSpec()):
            block = build(dataclasses.replace(BLOCK, pre_norm=pre, post_norm=post))
            pre_norm = layer_norm if pre else (lambda x: x)
            post_norm = layer_norm if post else (lambda x: x)
            x = X + post_norm(block.attention(pre_norm(X), CONTEXT, 0)[0])
            x = x + post_norm(mlp(block)(pre_norm(x)))
            np.testing.assert_allclose(block(X, CONTEXT, 0)[0], x, atol=1e-5)


def test_in_parallel_both_parts_read_the_same():
    block = build(dataclasses.replace(BLOCK, parallel=True))
    x = X + block.attention(layer_norm(X), CONTEXT, 0)[0] + mlp(block)(layer_norm(X))
    np.testing.assert_allclose(block(X, CONTEXT, 0)[0], x, atol=1e-5)


def test_one_norm_for_both_parts():
    block = build(dataclasses.replace(BLOCK, parallel=True, shared_norm=True))
    h = layer_norm(X)
    np.testing.assert_allclose(
        block(X, CONTEXT, 0)[0], X + block.attention(h, CONTEXT, 0)[0] + mlp(block)(h), atol=1e-5
    )
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(block, nnx.Param))}
    assert names == {"attention", "attention_pre_norm", "mlp"}


def test_both_terms_of_the_stream_are_scaled():
    block = build(dataclasses.replace(BLOCK, residual_scale=0.3))
    x = X + 0.3 * block.attention(layer_norm(X), CONTEXT, 0)[0]
    np.testing.assert_allclose(block(X, CONTEXT, 0)[0], x + 0.3 * mlp(block)(layer_norm(x)), atol=1e-5)


def test_residual_dropout_needs_a_key_and_keeps_the_mean():
    block = build(dataclasses.replace(BLOCK, dropout=0.5))
    exact = build(BLOCK)(X, CONTEXT, 0)[0]
    np.testing.assert_array_equal(block(X, CONTEXT, 0)[0], exact)
    keys = jax.random.split(jax.random.key(0), 2)
    one, repeated, other = (block(X, CONTEXT, 0, key=key)[0] for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(one, repeated)
    assert np.abs(one - other).max() > 0.1
    # What is dropped is what a part adds, never the stream itself: half of the elements after attention are X.
    attention_only = dataclasses.replace(BLOCK, dropout=0.5)
    silent = build(attention_only)
    down = weight_of(mlp(silent).down)
    down[...] = jnp.zeros_like(down[...])
    share = float(np.mean(np.asarray(silent(X, CONTEXT, 0, key=keys[0])[0] == X)))
    assert 0.35 < share < 0.65
