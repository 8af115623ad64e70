"""Routers against the formulas of the papers, token by token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.nn.expert_spec import ExpertGroupsSpec, MoeSpec, RouterSpec, SharedExpertSpec
from lm_trainer.nn.moe import Moe
from lm_trainer.nn.router import compute_scores, select_experts
from tests.nn.common import built, make_init, weight_of

E, K, M = 12, 3, 50
LOGITS = np.random.default_rng(0).standard_normal((M, E)).astype(np.float32)
BIAS = np.random.default_rng(1).normal(0.0, 0.3, E).astype(np.float32)


def scores_of(kind: str) -> np.ndarray:
    logits = LOGITS.astype(np.float64)
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def choose(spec: RouterSpec, scores: np.ndarray, bias: np.ndarray | None) -> tuple[list[int], list[float]]:
    """The experts of one token and their weights: DeepSeek-V2, section 2.1.3, and DeepSeek-V3, section 2.1.2."""
    choice = scores if bias is None else scores + bias
    allowed = set(range(E))
    if spec.groups is not None:
        groups = np.split(np.arange(E), spec.groups.count)
        best = {
            "max": lambda group: max(choice[group]),
            "top2": lambda group: sum(sorted(choice[group])[-2:]),
        }[spec.groups.score]
        kept = sorted(groups, key=best, reverse=True)[: spec.groups.top]
        allowed = {int(e) for group in kept for e in group}
    experts = sorted(allowed, key=lambda e: -choice[e])[:K]
    weights = [float(scores[e]) for e in experts]
    if spec.renormalize:
        weights = [w / sum(weights) for w in weights]
    return experts, [w * (spec.scale or 1.0) for w in weights]


@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(scores="sigmoid"),
        RouterSpec(renormalize=False, groups=ExpertGroupsSpec(4, 2, "max"), scale=16.0),
        RouterSpec(scores="sigmoid", groups=ExpertGroupsSpec(3, 2), scale=2.5, selection_bias=0.1),
        RouterSpec(selection_bias=0.1),
    ],
    ids=["sigmoid", "deepseek_v2", "deepseek_v3", "biased_softmax"],
)
def test_selection(spec: RouterSpec) -> None:
    bias = jnp.asarray(BIAS) if spec.selection_bias is not None else None
    moe = MoeSpec(8, E, K, router=spec)
    routing = jax.jit(lambda logits: select_experts(moe, compute_scores(spec, logits), bias))(LOGITS)
    for token, scores in enumerate(scores_of(spec.scores)):
        experts, weights = choose(spec, scores, None if bias is None else BIAS)
        assert list(np.asarray(routing.experts_MK[token])) == experts
        np.testing.assert_allclose(routing.weights_MK[token], weights, rtol=1e-5)


def test_weights_have_the_gradient_of_the_scores_and_the_bias_has_none() -> None:
    spec = MoeSpec(8, E, K, router=RouterSpec(scores="sigmoid", renormalize=False, selection_bias=0.0))

    def total(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(
            jnp.arange(1.0, K + 1)[None, :] * select_experts(spec, compute_scores(spec.router, logits), bias)[0]
        )

    of_logits, of_bias = jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.asarray(LOGITS), jnp.asarray(BIAS))
    scores, expected = scores_of("sigmoid"), np.zeros((M, E))
    for token in range(M):
        for place, e in enumerate(choose(spec.router, scores[token], BIAS)[0]):
            expected[token, e] = (place + 1) * scores[token, e] * (1 - scores[token, e])
    np.testing.assert_allclose(of_logits, expected, atol=1e-6)
    assert not np.any(of_bias)


B, S, D = 3, 7, 8
X = np.random.default_rng(2).standard_normal((B, S, D)).astype(np.float32)
VALID = np.ones((B, S), bool)
VALID[1, 4:] = VALID[2, 1:] = False


def penalty_and_gradients(spec: MoeSpec, load: np.ndarray | None = None) -> tuple[Moe, float, float, Any]:
    """The balance and the penalty of a layer, and the gradient of the penalty."""
    moe = built(lambda: Moe(spec, D, init=make_init(0.5)))
    if load is not None:
        assert moe.load is not None
        moe.load[...] = jnp.asarray(load)
    graph, params = nnx.split(moe, nnx.Param)

    def penalty(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        stats = nnx.merge(graph, params)(jnp.asarray(X), jnp.asarray(VALID))[1]
        return stats.penalty, stats.balance

    (value, balance), gradients = jax.jit(jax.value_and_grad(penalty, has_aux=True))(params)
    return moe, float(balance), float(value), gradients


def route(moe: Moe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, probabilities and choices [B, S, ...] of every token, in float64."""
    logits = X.astype(np.float64) @ np.asarray(moe.router[...], np.float64)
    scores = 1 / (1 + np.exp(-logits))
    if moe.spec.router.scores == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    bias = 0.0 if moe.selection_bias is None else np.asarray(moe.selection_bias[...])
    chosen = np.argsort(-(scores + bias), axis=-1)[..., : moe.spec.top_k]
    return scores, scores / scores.sum(-1, keepdims=True), chosen


def counts_of(chosen: np.ndarray) -> np.ndarray:
    return np.bincount(chosen.reshape(-1), minlength=E).astype(np.float64)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balance_over_rows(scores: Any) -> None:
    """DeepSeek-V3, equations 17 to 20, for each row; each row counts by its number of tokens."""
    moe, balance, penalty, _ = penalty_and_gradients(
        MoeSpec(8, E, K, router=RouterSpec(scores=scores, balance_coef=0.5, balance_over="row"))
    )
    _, probs, chosen = route(moe)
    expected = 0.0
    for row in range(B):
        tokens = VALID[row].sum()
        load = E / (K * tokens) * counts_of(chosen[row][VALID[row]])
        expected += tokens * np.sum(load * probs[row][VALID[row]].mean(0))
    np.testing.assert_allclose(balance, expected, rtol=1e-5)
    np.testing.assert_allclose(penalty, 0.5 * expected, rtol=1e-5)


def test_balance_over_the_batch_takes_the_load_of_the_step_before() -> None:
    load = np.random.default_rng(3).uniform(0.0, 2.0, E).astype(np.float32)
    spec = MoeSpec(8, E, K, router=RouterSpec(balance_coef=0.5, balance_over="batch"))
    moe, balance, _, gradients = penalty_and_gradients(spec, load)
    _, probs, chosen = route(moe)
    np.testing.assert_allclose(balance, K * np.sum(load * probs[VALID].sum(0)), rtol=1e-5)
    np.testing.assert_array_equal(gradients["load"][...], counts_of(chosen[VALID]))
    # The derivative of sum_e f_e p_e by the logits is p_e (f_e - sum_i f_i p_i).
    slope = probs * (load - (probs * load).sum(-1, keepdims=True)) * VALID[..., None]
    expected = 0.5 * K * np.einsum("bsd,bse->de", X, slope)
    np.testing.assert_allclose(gradients["router"][...], expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_selection_bias_is_the_load() -> None:
    """Also without a loss, for experts in a loop over layers, and recomputed in the backward pass."""
    spec = MoeSpec(8, E, K, router=RouterSpec(scores="sigmoid", selection_bias=0.01))
    moe, _, penalty, gradients = penalty_and_gradients(spec)
    assert penalty == 0.0
    np.testing.assert_array_equal(gradients["selection_bias"][...], counts_of(route(moe)[2][VALID]))
    assert not np.any(gradients["router"][...])


def test_the_bias_of_the_logits_moves_scores_and_selection() -> None:
    """As in gpt-oss: the bias counts for the weights too, and is trained."""
    spec = MoeSpec(8, E, K, router=RouterSpec(logit_bias=True, z_coef=1.0))
    moe = built(lambda: Moe(spec, D, init=make_init(0.5)))
    assert moe.router_bias is not None
    moe.router_bias[...] = jnp.asarray(BIAS)
    graph, params = nnx.split(moe, nnx.Param)

    def z(params: nnx.State) -> jax.Array:
        return nnx.merge(graph, params)(jnp.asarray(X), jnp.asarray(VALID))[1].z

    value, gradients = jax.jit(jax.value_and_grad(z))(params)
    logits = (X.astype(np.float64) @ np.asarray(moe.router[...], np.float64) + BIAS)[VALID]
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(value, np.square(log_z).sum(), rtol=1e-5)
    expected = (2 * log_z * np.exp(logits - log_z)).sum(0)
    np.testing.assert_allclose(gradients["router_bias"][...], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert(gated: bool) -> None:
    spec = MoeSpec(8, E, K, shared=SharedExpertSpec(20, gated=gated), kernel="grouped")
    moe = built(lambda: Moe(spec, D, init=make_init(0.5)))
    routed = built(lambda: Moe(dataclasses.replace(spec, shared=None), D, init=make_init(0.5)))
    rows = jnp.asarray(X), jnp.asarray(VALID)
    total, alone = (jax.jit(lambda *rows, module=module: module(*rows)[0])(*rows) for module in (moe, routed))
    assert moe.shared is not None
    x = X.astype(np.float64)
    mlp = moe.shared.mlp
    assert mlp.gate is not None
    gate, up, down = (np.asarray(weight_of(linear)[...], np.float64) for linear in (mlp.gate, mlp.up, mlp.down))
    expected = (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down
    if gated:
        assert moe.shared.gate is not None
        expected /= 1 + np.exp(-x @ np.asarray(moe.shared.gate[...], np.float64))
    np.testing.assert_allclose(total - alone, expected, rtol=1e-4, atol=1e-5)
