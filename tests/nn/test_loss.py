from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from lm_trainer.nn.expert_spec import MoeSpec, RouterSpec
from lm_trainer.nn.loss import LossTerms, token_loss, weighted_nll
from lm_trainer.nn.spec import HeadSpec
from tests.compiling import quick_jit
from tests.nn.common import BLOCK, init, make_batch, make_spec

N, D, V = 21, 8, 13
RNG = np.random.default_rng(0)
H = jnp.asarray(RNG.standard_normal((N, D)), jnp.float32)
W = jnp.asarray(RNG.standard_normal((V, D)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, V, N), jnp.int32)
WEIGHTS = jnp.asarray(RNG.uniform(0, 2, N) * (RNG.uniform(size=N) > 0.3), jnp.float32)


def plain(h: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(h @ w.T, axis=-1)
    return -jnp.sum(weights * log_probs[jnp.arange(len(targets)), targets])


@pytest.mark.parametrize("block", [None, 1, 4, 100])
def test_value_and_gradients(block):
    # The gradient is computed with the value, before the factor behind it is known.
    def scaled(f):
        return lambda h, w, weights: 0.37 * f(h, w, TARGETS, weights) + 1.0

    expected = jax.jit(jax.value_and_grad(scaled(plain), argnums=(0, 1, 2)))(H, W, WEIGHTS)
    actual = jax.jit(
        jax.value_and_grad(scaled(lambda *args: weighted_nll(*args, block_size=block)), argnums=(0, 1, 2))
    )(H, W, WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), expected, actual)
    alone = jax.jit(lambda: weighted_nll(H, W, TARGETS, WEIGHTS, block))()
    np.testing.assert_allclose(alone, jax.jit(plain)(H, W, TARGETS, WEIGHTS), rtol=1e-6)


def test_softcap_of_the_logits():
    def capped(h: jax.Array, w: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(2.0 * jnp.tanh(h @ w.T / 2.0), axis=-1)
        return -jnp.sum(WEIGHTS * log_probs[jnp.arange(N), TARGETS])

    expected = jax.jit(jax.value_and_grad(capped, argnums=(0, 1)))(H, W)
    actual = jax.jit(jax.value_and_grad(lambda h, w: weighted_nll(h, w, TARGETS, WEIGHTS, 4, 2.0), argnums=(0, 1)))(
        H, W
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), expected, actual)


def naive_terms(logits: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """-log p(target) and (log sum exp logits)^2 of each position."""
    log_z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    return log_z - jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], axis=-1)[..., 0], log_z**2


@pytest.mark.slow
@pytest.mark.parametrize(("block", "softcap"), [pytest.param(None, None, marks=pytest.mark.slow), (5, 2.0)])
def test_z_loss_is_in_the_gradient_and_beside_the_value(block: int | None, softcap: float | None) -> None:
    graphdef, params = init(make_spec(head=HeadSpec(softcap=softcap)))
    batch, z_loss_weight = make_batch(3, 12, 37), 0.3

    def naive(params: Any) -> Any:
        logits = nnx.merge(graphdef, params)(batch.tokens, batch.positions, batch.segments)
        nll, squares = (jnp.sum(batch.weights * x) for x in naive_terms(logits, batch.targets))
        return nll + z_loss_weight * squares, (nll, z_loss_weight * squares)

    def loss(params: Any) -> Any:
        terms = LossTerms(z_loss_weight)
        total, _, metrics = token_loss(nnx.merge(graphdef, params), batch, block_size=block, terms=terms)
        return total, (total, metrics["z_loss"])

    (_, expected), expected_grads = quick_jit(jax.value_and_grad(naive, has_aux=True))(params)
    (_, loss_sums), grads = quick_jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert expected[1] > 1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4),
        (expected, expected_grads),
        (loss_sums, grads),
    )


@pytest.mark.parametrize(("block", "softcap"), [(None, 2.0), (5, None)])
def test_entropy_of_the_predictions(block: int | None, softcap: float | None) -> None:
    graphdef, params = init(make_spec(head=HeadSpec(softcap=softcap)))
    batch = make_batch(3, 12, 37)

    def naive(params: Any) -> jax.Array:
        p = jax.nn.softmax(nnx.merge(graphdef, params)(batch.tokens, batch.positions, batch.segments), axis=-1)
        return -jnp.sum(batch.weights[..., None] * p * jnp.log(p))

    def sums(params: Any, terms: LossTerms) -> Any:
        return token_loss(nnx.merge(graphdef, params), batch, block_size=block, terms=terms)

    expected = quick_jit(naive)(params)
    loss, weight, metrics = quick_jit(lambda p: sums(p, LossTerms(entropy=True)))(params)
    np.testing.assert_allclose(metrics["entropy"], expected, rtol=1e-5)
    np.testing.assert_allclose(loss, quick_jit(lambda p: sums(p, LossTerms())[0])(params), rtol=1e-6)
    assert 0 < expected < weight * np.log(37)


@pytest.mark.slow
def test_penalties_of_routers_are_in_the_gradient_alone():
    def losses(coef: float):
        moe = MoeSpec(12, 4, 2, router=RouterSpec(balance_coef=coef))
        graphdef, params = init(make_spec(blocks=(dataclasses.replace(BLOCK, mlp=moe),)))
        batch = make_batch(2, 8, 37)

        def loss(params: Any) -> Any:
            total, weight, metrics = token_loss(nnx.merge(graphdef, params), batch)
            return total, (weight, metrics)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    ((plain, (weight, metrics)), grads), ((unpenalised, (_, penalised)), other) = losses(0.0), losses(0.5)
    assert plain == unpenalised
    assert metrics["router_penalty"] == 0
    np.testing.assert_allclose(penalised["router_penalty"], 0.5 * metrics["router_balance"], rtol=1e-6)
    assert metrics["router_balance"] / weight > 1.9
    pick = lambda g: g["blocks"]["0"]["mlp"]["router"]  # noqa: E731
    assert np.abs(pick(grads) - pick(other)).max() > 1e-3


@pytest.mark.slow
def test_hessian_vector_product():
    tangent = jnp.asarray(RNG.standard_normal((V, D)), jnp.float32)

    def product(f):
        return jax.jvp(jax.grad(lambda w: f(H, w, TARGETS, WEIGHTS)), (W,), (tangent,))[1]

    actual = product(lambda *args: weighted_nll(*args, block_size=4))
    np.testing.assert_allclose(actual, product(plain), rtol=1e-4, atol=1e-4)


def test_large_logits_stay_finite():
    # exp overflows float32 beyond 88.
    value, grad = jax.jit(jax.value_and_grad(lambda h: weighted_nll(h, W, TARGETS, WEIGHTS, 4)))(1e4 * H)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


def test_a_target_outside_the_vocabulary_is_not_silent():
    targets = np.array(TARGETS)
    targets[0] = V
    assert np.isnan(jax.jit(lambda t: weighted_nll(H, W, t, jnp.ones(N), 4))(targets))


def test_blocks_hold_no_logits_of_all_tokens():
    n, v, block = 512, 1031, 64
    h, w = jnp.ones((n, D)), jnp.ones((v, D))
    targets, weights = jnp.zeros(n, jnp.int32), jnp.ones(n)

    def sizes(block_size: int | None) -> set[int]:
        grad = jax.jit(jax.grad(lambda h, w: weighted_nll(h, w, targets, weights, block_size), argnums=(0, 1)))
        text = grad.lower(h, w).compile().as_text() or ""
        return {int(np.prod([int(d) for d in m.split(",")])) for m in re.findall(r"\w+\[([\d,]+)\]", text)}

    # The control: where all logits are held, the pattern finds them.
    assert max(sizes(None)) >= n * v
    assert max(sizes(block)) <= max(block * v, v * D, n * D)


def test_without_differentiation_no_gradient_is_computed():
    forward = str(jax.make_jaxpr(lambda h, w: weighted_nll(h, w, TARGETS, WEIGHTS, 4))(H, W))
    compiled = jax.jit(lambda h, w: weighted_nll(h, w, TARGETS, WEIGHTS, 4)).lower(H, W).as_text()
    assert forward.count("dot_general") == 1
    assert compiled.count("dot_general") == 1


def test_bfloat16_sums_the_weight_gradient_in_float32():
    rows = 4096
    h, w = jnp.ones((rows, 2), jnp.bfloat16), jnp.zeros((4, 2), jnp.float32)
    targets, weights = jnp.zeros(rows, jnp.int32), jnp.ones(rows)
    grad = jax.jit(jax.grad(lambda w: weighted_nll(h, w, targets, weights, 1)))(w)
    # 4096 additions of 1/4: a bfloat16 sum stops growing at 64.
    np.testing.assert_allclose(grad[1:], rows / 4)
    assert grad.dtype == jnp.float32


@pytest.mark.parametrize("block", [None, 2])
def test_inside_shard_map(block):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    n = 16

    def local(h, w, targets, weights):
        loss, grads = jax.value_and_grad(lambda h, w: weighted_nll(h, w, targets, weights, block), argnums=(0, 1))(
            h, jax.lax.pcast(w, ("data",), to="varying")
        )
        return jax.lax.psum(loss, "data"), grads[0], jax.lax.psum(grads[1], "data")

    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    sharded = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(rows, everywhere, rows, rows), out_specs=(everywhere, rows, everywhere)
        )
    )
    actual = sharded(H[:n], W, TARGETS[:n], WEIGHTS[:n])
    value, grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(H[:n], W, TARGETS[:n], WEIGHTS[:n])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5), (value, *grads), actual)


def test_token_loss_sums_over_the_weights_of_a_batch():
    graphdef, params = init(make_spec())
    batch = make_batch(3, 12, 37)

    def log_probs(params):
        return jax.nn.log_softmax(nnx.merge(graphdef, params)(batch.tokens, batch.positions, batch.segments))

    chosen = np.take_along_axis(np.asarray(jax.jit(log_probs)(params)), np.asarray(batch.targets)[..., None], -1)[
        ..., 0
    ]
    loss, weight, _ = jax.jit(lambda p: token_loss(nnx.merge(graphdef, p), batch, block_size=5))(params)
    np.testing.assert_allclose(loss, -(chosen * batch.weights).sum(), rtol=1e-5)
    assert weight == batch.weights.sum()
    assert loss.dtype == weight.dtype == jnp.float32
