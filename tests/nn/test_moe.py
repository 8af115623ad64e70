from __future__ import annotations

import contextlib
import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.errors import UserError
from lm_trainer.nn.expert_spec import ClampedGluSpec, ExpertKernel, MoeSpec, RouterSpec
from lm_trainer.nn.grouped_product import KERNELS
from lm_trainer.nn.moe import Moe
from lm_trainer.parallel.mesh import BATCH_AXES, MeshShape, build_mesh
from lm_trainer.parallel.target_platform import compiling_for
from tests.nn.common import built, make_init

D, F, E, K = 8, 12, 4, 2
SPEC = MoeSpec(F, E, K, router=RouterSpec(balance_coef=0.5, z_coef=0.25), kernel="ragged_dot")
X = np.random.default_rng(0).standard_normal((2, 7, D)).astype(np.float32)
EVERY = np.ones((2, 7), bool)


def build(spec: MoeSpec = SPEC) -> Moe:
    return built(lambda: Moe(spec, D, init=make_init(0.5)))


def router(moe: Moe) -> np.ndarray:
    return X.reshape(-1, D).astype(np.float64) @ np.asarray(moe.router[...], np.float64)


def brute_force(moe: Moe, *, renormalize: bool) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    gate, up, down = (np.asarray(w[...], np.float64) for w in (moe.gate, moe.up, moe.down))
    out = np.zeros((X.shape[0] * X.shape[1], D))
    for token, (x, logits) in enumerate(zip(X.reshape(-1, D), router(moe), strict=True)):
        probs = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-probs)[:K]
        total = probs[chosen].sum() if renormalize else 1.0
        for e in chosen:
            g = x @ gate[e]
            out[token] += probs[e] / total * ((g / (1 + np.exp(-g)) * (x @ up[e])) @ down[e])
    return out.reshape(X.shape)


@pytest.mark.parametrize(("renormalize", "kernel"), [(True, "ragged_dot"), (False, "dense"), (True, "grouped")])
def test_every_token_gets_its_experts(renormalize, kernel):
    moe = build(MoeSpec(F, E, K, router=RouterSpec(renormalize=renormalize), kernel=kernel))
    actual = jax.jit(lambda x: moe(x, jnp.asarray(EVERY))[0])(jnp.asarray(X))
    np.testing.assert_allclose(actual, brute_force(moe, renormalize=renormalize), atol=1e-4)


def test_nothing_is_dropped_when_all_choose_the_same():
    moe = build()
    # All inputs are positive, so expert 1 wins everywhere, and the second place goes to the first of equal ones.
    moe.router[...] = jnp.asarray(np.where(np.arange(E) == 1, np.float32(1e-6), np.zeros((D, E), np.float32)))
    x = (np.ones((1, 9, D)) + np.arange(9.0)[None, :, None] / 10).astype(np.float32)
    run = jax.jit(lambda x: moe(x, jnp.ones(x.shape[:2], bool)))
    all_tokens, stats = run(x)
    alone = np.concatenate([run(x[:, i : i + 1])[0] for i in range(9)], axis=1)
    np.testing.assert_allclose(all_tokens, alone, rtol=1e-5)
    assert stats.overload == pytest.approx(9 * E / K)


def test_statistics_and_penalty():
    moe = build()
    counted = EVERY.copy()
    counted[1, 3:] = False
    stats = jax.jit(lambda *rows: moe(*rows)[1])(X, counted)
    logits = router(moe)[counted.reshape(-1)]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probs, axis=-1)[:, :K]
    load = np.bincount(chosen.reshape(-1), minlength=E) / len(logits)
    balance = E * np.sum(load * probs.mean(0)) * len(logits)
    z = np.square(np.log(np.exp(logits).sum(-1))).sum()
    np.testing.assert_allclose(stats.balance, balance, rtol=1e-5)
    np.testing.assert_allclose(stats.z, z, rtol=1e-5)
    np.testing.assert_allclose(stats.overload, load.max() / load.mean() * len(logits), rtol=1e-5)
    np.testing.assert_allclose(stats.penalty, 0.5 * balance + 0.25 * z, rtol=1e-5)


def test_gradients_are_those_of_all_experts_weighted():
    """Against a computation by every expert, with zero weights for those that were not chosen."""
    moe = build()
    params = [moe.router[...], moe.gate[...], moe.up[...], moe.down[...]]

    def loss(params: list[jax.Array], x: jax.Array, spec: MoeSpec) -> jax.Array:
        module = build(spec)
        for variable, value in zip((module.router, module.gate, module.up, module.down), params, strict=True):
            variable[...] = value
        return jnp.sum(jnp.sin(module(x, jnp.asarray(EVERY))[0]))

    def dense(params: list[jax.Array], x: jax.Array) -> jax.Array:
        router, gate, up, down = params
        probs = jax.nn.softmax(x @ router, axis=-1)
        weights, chosen = jax.lax.top_k(probs, K)
        weights = weights / weights.sum(-1, keepdims=True)
        expert_weights = jnp.sum(weights[..., None] * (chosen[..., None] == jnp.arange(E)[None, None, None]), axis=-2)
        h = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * jnp.einsum("bsd,edf->bsef", x, up)
        return jnp.sum(jnp.sin(jnp.einsum("bsef,efd,bse->bsd", h, down, expert_weights)))

    x = jnp.asarray(X)
    expected = jax.jit(jax.grad(dense, argnums=(0, 1)))(params, x)
    for spec in (SPEC, *(dataclasses.replace(SPEC, kernel=kernel) for kernel in ("dense", "grouped"))):
        result = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(params, x, spec)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-4), expected, result)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_only_tpus_multiply_in_groups_by_themselves(platform):
    def operations(kernel: ExpertKernel | None) -> float:
        moe = build(dataclasses.replace(SPEC, kernel=kernel))
        with compiling_for(platform):
            cost = jax.jit(lambda x: moe(x, jnp.asarray(EVERY))[0]).lower(jnp.asarray(X)).cost_analysis()
        assert cost is not None
        return cost["flops"]

    # As XLA for a CPU counts both.
    assert operations("dense") < operations("ragged_dot")
    assert operations(None) == operations("ragged_dot" if platform == "tpu" else "dense")


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        ("PJRT C API\ncuda 12090", "8.0", None),
        ("PJRT C API\ncuda 12090", "7.5", "Some GPU is of compute capability 7.5, and it needs 8.0 (Ampere) or more"),
        ("PJRT C API\nrocm 60300", "gfx90a", "Some GPU is no GPU of NVIDIA"),
    ],
)
def test_gpus_without_the_kernel_compute_every_expert(monkeypatch, version, capability, reason):
    gpu = mock.Mock(platform="gpu", device_kind="Some GPU", compute_capability=capability)
    gpu.client.platform_version = version
    product = mock.Mock(side_effect=lambda x, w, _: x @ w[0])
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setitem(KERNELS, "gpu", dataclasses.replace(KERNELS["gpu"], product=product))

    def run(kernel: ExpertKernel) -> None:
        moe = build(dataclasses.replace(SPEC, kernel=kernel))
        with compiling_for("gpu"):
            jax.jit(lambda x: moe(x, jnp.asarray(EVERY))[0]).trace(jnp.asarray(X))

    run("auto")
    assert product.called == (reason is None)
    with contextlib.nullcontext() if reason is None else pytest.raises(UserError, match=re.escape(reason)):
        run("grouped")


def test_the_router_computes_in_float32():
    moe = build()
    x = X.astype(jnp.bfloat16)
    output, stats = jax.jit(lambda *rows: moe(*rows))(x, EVERY)
    assert output.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64).reshape(-1, D) @ np.asarray(moe.router[...], np.float64)
    np.testing.assert_allclose(stats.z, np.square(np.log(np.exp(exact).sum(-1))).sum(), rtol=1e-5)


def test_devices_that_have_rows_of_their_own_send_no_tokens():
    moe = build()
    mesh = build_mesh(MeshShape(), jax.devices()[:2])
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(BATCH_AXES), PartitionSpec()))
    graph, params = nnx.split(moe)

    def value(params: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x, jnp.asarray(EVERY))[0]))

    run = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))
    alone = run(params, jnp.asarray(X))
    placed = jax.device_put(params, everywhere), jax.device_put(jnp.asarray(X), rows)
    compiled = run.lower(*placed).compile()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5), alone, compiled(*placed))
    # Sums of gradients and of what the loss reports are all that is exchanged.
    program = compiled.as_text()
    assert program is not None
    assert "all-reduce" in program
    assert "all-gather" not in program


def clamped_by_brute_force(moe: Moe, glu: ClampedGluSpec) -> np.ndarray:
    """Token by token, expert by expert, in float64, from the formula of arXiv 2508.10925."""
    gate, up, down, gate_bias, up_bias, down_bias, router_bias = (
        np.asarray(param[...], np.float64)
        for param in (moe.gate, moe.up, moe.down, moe.gate_bias, moe.up_bias, moe.down_bias, moe.router_bias)
        if param is not None
    )
    out = np.zeros((X.shape[0] * X.shape[1], D))
    for token, (x, logits) in enumerate(zip(X.reshape(-1, D), router(moe) + router_bias, strict=True)):
        chosen = np.argsort(-logits)[:K]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for e, weight in zip(chosen, weights, strict=True):
            g = np.minimum(x @ gate[e] + gate_bias[e], glu.limit)
            u = np.clip(x @ up[e] + up_bias[e], -glu.limit, glu.limit)
            out[token] += weight * (g / (1 + np.exp(-glu.slope * g)) * (u + 1) @ down[e] + down_bias[e])
    return out.reshape(X.shape)


def test_experts_with_biases_and_bounds():
    """All kernels compute the formula, and have the same gradients of biases and weights."""
    glu = ClampedGluSpec(slope=1.3, limit=0.9)
    clamped = MoeSpec(F, E, K, glu=glu, bias=True, router=RouterSpec(logit_bias=True))
    rng = np.random.default_rng(1)
    graph, params = nnx.split(build(clamped))
    # Biases are zero at first, which would hide a mistake.
    params = jax.tree.map(lambda x: x + 0.3 * jnp.asarray(rng.standard_normal(x.shape, np.float32)), params)
    expected = clamped_by_brute_force(nnx.merge(graph, params), glu)
    gradients = {}
    for kernel in ("dense", "grouped", "ragged_dot"):
        graph = nnx.split(build(dataclasses.replace(clamped, kernel=kernel)))[0]

        def loss(params: nnx.State, graph: nnx.GraphDef[Moe] = graph) -> tuple[jax.Array, jax.Array]:
            y_BSD = nnx.merge(graph, params)(jnp.asarray(X), jnp.asarray(EVERY))[0]
            return jnp.sum(jnp.sin(y_BSD)), y_BSD

        gradients[kernel], actual = jax.jit(jax.grad(loss, has_aux=True))(params)
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    for kernel in ("grouped", "ragged_dot"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-4), gradients["dense"], gradients[kernel]
        )
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients["dense"]))


@pytest.mark.parametrize("kernel", ["ragged_dot", "dense", "grouped"])
def test_weights_of_inputs(kernel: ExpertKernel) -> None:
    """As in Llama 4: the sigmoid of a logit multiplies the input of its expert."""
    scores = RouterSpec(scores="sigmoid", renormalize=False)
    moe = build(MoeSpec(F, E, K, router=scores, kernel=kernel, weighs_inputs=True))
    gate, up, down = (np.asarray(w[...], np.float64) for w in (moe.gate, moe.up, moe.down))
    expected = np.zeros((X.shape[0] * X.shape[1], D))
    for token, (x, logits) in enumerate(zip(X.reshape(-1, D), router(moe), strict=True)):
        for e in np.argsort(-logits)[:K]:
            weighted = x / (1 + np.exp(-logits[e]))
            g = weighted @ gate[e]
            expected[token] += (g / (1 + np.exp(-g)) * (weighted @ up[e])) @ down[e]
    actual = jax.jit(lambda x: moe(x, jnp.asarray(EVERY))[0])(jnp.asarray(X))
    np.testing.assert_allclose(actual, expected.reshape(X.shape), atol=1e-4)
