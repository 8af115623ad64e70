from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.nn import cudnn_attention
from lm_trainer.nn.attention import causal_bias
from lm_trainer.nn.attention_dispatch import BackendChoice, choose_backend, dispatch_attention
from lm_trainer.nn.attention_kernel import AttentionMetadata
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec, ScoreSpec

SPEC = AttentionSpec(4, 64, num_kv_heads=2, window=16, scores=ScoreSpec(backend="auto"))
B, S, N, K, H = 2, 11, 4, 2, 8
RNG = np.random.default_rng(0)
Q, KEYS, V = (jnp.asarray(RNG.standard_normal((B, S, heads, H)), jnp.float32) for heads in (N, K, K))
SEGMENTS = jnp.asarray([[0] * 4 + [1] * 7, [0] * 11])
SINKS = jnp.asarray([-1.0, 0.0, 1.0, 3.0])


def scored(**fields: object) -> AttentionSpec:
    return dataclasses.replace(SPEC, scores=dataclasses.replace(SPEC.scores, **fields))  # pyright: ignore[reportArgumentType]


def choose(spec: AttentionSpec, platform: str = "gpu", dtype: DTypeLike = jnp.bfloat16, **site: Any) -> BackendChoice:
    return choose_backend(spec, AttentionMetadata(platform, dtype, **{"queries": 256, "keys": 256, **site}))


def test_auto_takes_the_kernel_of_the_platform_where_it_can():
    assert choose(SPEC, "gpu").backend == "cudnn"
    assert choose(SPEC, "tpu").backend == "splash"
    assert choose(scored(softcap=5.0, upcast=True, block_size=128), "tpu", jnp.float32).backend == "splash"
    assert choose(scored(backend="xla"), "gpu").backend == "xla"
    assert choose(SPEC, "gpu", cached=True, queries=1, keys=99).backend == "cudnn", "no gradient is taken"
    assert choose(SPEC, "cpu") == BackendChoice("xla", "the platform has no fused kernel")


ON_GPU = [
    (SPEC, {"platform": "cpu"}, "the platform is cpu, not an NVIDIA GPU"),
    (SPEC, {"platform": "tpu"}, "the platform is tpu, not an NVIDIA GPU"),
    (SPEC, {"dtype": jnp.float32}, "not float32"),
    (SPEC, {"queries": 255, "keys": 255}, "rows of 255 positions: it trains on even numbers"),
    (dataclasses.replace(SPEC, head_dim=12), {}, "head_dim=12"),
    (dataclasses.replace(SPEC, head_dim=256), {}, "head_dim=256"),
    (scored(softcap=5.0), {}, "softcap"),
    (scored(dropout=0.1), {}, "dropout"),
    (dataclasses.replace(SPEC, sinks=True), {}, "it has no attention sinks"),
    (scored(upcast=True), {}, "upcast_attn"),
    (scored(block_size=8), {}, "flash_attention_block_size"),
    (SPEC, {"second_derivative": True}, "its gradient has no derivative"),
    (scored(max_documents=2), {"gpu_generation": 8}, "lengths of documents (attn_max_documents) only since Hopper"),
    (SPEC, {"gpu_generation": 10, "fixed_order": True}, "on Blackwell; with model.attn_max_documents"),
    (
        dataclasses.replace(scored(max_documents=2), positions=AlibiSpec()),
        {"gpu_generation": 12, "fixed_order": True},
        "on Blackwell",
    ),
]
ON_TPU = [
    (SPEC, {"platform": "cpu"}, "the platform is cpu, not a TPU"),
    (SPEC, {"dtype": jnp.float16}, "not float16"),
    (dataclasses.replace(SPEC, positions=AlibiSpec()), {}, "ALiBi"),
    (scored(dropout=0.1), {}, "dropout"),
    (SPEC, {"queries": 128}, "context_axis_size"),
    (SPEC, {"queries": 200, "keys": 200}, "rows of 200 positions are not a multiple of 128"),
    (scored(block_size=64), {}, "flash_attention_block_size=64 is not a multiple of 128 that divides rows of 256"),
    (SPEC, {"second_derivative": True}, "its gradient has no derivative"),
    (scored(block_size=384), {"queries": 512, "keys": 512}, "flash_attention_block_size=384"),
]


@pytest.mark.parametrize(
    ("backend", "spec", "site", "reason"),
    [("cudnn", *case) for case in ON_GPU] + [("splash", *case) for case in ON_TPU],
)
def test_a_backend_that_cannot_do_it_is_not_chosen(backend, spec, site, reason):
    site = {"platform": "gpu" if backend == "cudnn" else "tpu", **site}
    choice = choose(spec, **site)
    assert choice.backend == ("splash" if (backend, site["platform"]) == ("cudnn", "tpu") else "xla")
    forced = dataclasses.replace(spec, scores=dataclasses.replace(spec.scores, backend=backend))
    with pytest.raises(UserError, match=f"attn_backend: {backend} cannot be used: .*{re.escape(reason)}.*; write xla"):
        choose(forced, **site)
    if choice.backend == "xla" and site["platform"] != "cpu":
        assert f"{backend} cannot be used: " in choice.reason
        assert reason in choice.reason


@pytest.mark.parametrize("backend", ["auto", "splash"])
def test_xla_decodes_where_another_backend_cannot(backend):
    choice = choose(scored(backend=backend), "tpu", cached=True, queries=1)
    assert choice.backend == "xla"
    assert "splash cannot be used: it does not decode with a cache" in choice.reason
    assert choose(scored(backend="cudnn"), "cpu", cached=True, queries=1).backend == "xla"


@pytest.mark.parametrize(
    ("spec", "site"),
    [
        (scored(max_documents=2), {"gpu_generation": 10, "fixed_order": True}),
        (scored(max_documents=1), {"gpu_generation": 8}),
        (SPEC, {"gpu_generation": 10}),
        (SPEC, {"gpu_generation": 10, "fixed_order": True, "cached": True, "queries": 1}),
        (SPEC, {"gpu_generation": 9, "fixed_order": True}),
    ],
)
def test_masks_that_a_generation_takes(spec: AttentionSpec, site: dict[str, Any]):
    assert choose(spec, "gpu", **site).backend == "cudnn"


@pytest.mark.parametrize(
    ("site", "chosen"),
    [
        ({"fixed_order": True}, "ring"),
        ({"fixed_order": True, "queries": 40962, "keys": 40962}, "xla"),
        ({"fixed_order": True, "gpu_generation": 8}, "cudnn"),
        ({"fixed_order": True, "queries": 1, "cached": True}, "cudnn"),
        ({"fixed_order": False}, "cudnn"),
    ],
)
def test_auto_computes_blocks_where_the_workspace_of_a_kernel_is_too_large(site: dict[str, Any], chosen: str):
    site = {"queries": 40960, "keys": 40960, "gpu_generation": 9, **site}
    choice = choose(SPEC, "gpu", **site)
    assert choice.backend == chosen
    if chosen == "cudnn":
        return
    assert "its backward pass that repeats its bits takes 12.5 GiB for a row of 4096" in choice.reason
    with pytest.raises(UserError, match=r"attn_backend: cudnn cannot be used: its backward pass .* 12\.5 GiB"):
        choose(scored(backend="cudnn"), "gpu", **site)


CUDA = "PJRT C API\ncuda 12080"


@pytest.mark.parametrize(
    ("version", "capability", "cudnn", "reason"),
    [
        ("PJRT C API\nrocm 60300", "gfx90a", None, "Some GPU is no GPU of NVIDIA"),
        (CUDA, "7.5", 91801, "Some GPU is of compute capability 7.5, and it needs 8.0 (Ampere) or more"),
        (CUDA, "8.0", 90800, None),
        (CUDA, "9.0", 91800, None),
        (CUDA, "10.0", 91002, "cuDNN 9.10.2 has no backward pass for Some GPU that repeats its bits, as 9.18.1 has"),
        (CUDA, "10.0", 91801, None),
        (CUDA, "12.0", None, None),
    ],
)
def test_a_gpu_without_the_kernels_takes_xla(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: str, cudnn: int | None, reason: str | None
):
    monkeypatch.setattr(cudnn_attention, "cudnn_version", lambda: cudnn)
    gpu = mock.Mock(platform="gpu", device_kind="Some GPU", compute_capability=capability)
    gpu.client.platform_version = version
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    kernel = mock.Mock(side_effect=lambda q, *_, **__: q)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    spec = dataclasses.replace(SPEC, head_dim=H, window=None)
    q, k, v = (x[:, :10].astype(jnp.bfloat16) for x in (Q, KEYS, V))
    bias, segments = causal_bias(SEGMENTS[:, :10]), SEGMENTS[:, :10]
    dispatch_attention(spec, q, k, v, bias, segments_BS=segments)
    assert kernel.called == (reason is None)
    forced = dataclasses.replace(spec, scores=dataclasses.replace(spec.scores, backend="cudnn"))
    expected = contextlib.nullcontext() if reason is None else pytest.raises(UserError, match=re.escape(reason))
    with expected:
        dispatch_attention(forced, q, k, v, bias, segments_BS=segments)


LONG = {"queries": 2**13, "keys": 2**17}


@pytest.mark.parametrize(
    ("platform", "site", "chosen", "reason"),
    [
        ("tpu", LONG, "ring", "arrays of 36 GiB for 8192 x 131072 pairs"),
        ("gpu", LONG, "cudnn", "arrays of 6 GiB"),
        ("gpu", {"queries": 2**14, "keys": 2**17}, "ring", "arrays of 12 GiB"),
        ("tpu", {"queries": 2**12, "keys": 2**13}, "xla", "arrays of 1.12 GiB"),
        ("tpu", {"queries": 2**13 - 1, "keys": 2**17 - 16}, "xla", "but ring cannot be used: rows of 131056 positions"),
        ("gpu", {"queries": 2**17, "keys": 2**17}, "cudnn", "can do all that the model asks for"),
    ],
)
def test_auto_gathers_keys_while_arrays_of_pairs_are_small(platform: str, site: Any, chosen: str, reason: str):
    choice = choose(dataclasses.replace(SPEC, window=None), platform, **site)
    assert choice.backend == chosen
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("site", "size", "reason"),
    [
        ({"queries": 5, "keys": 10}, None, "rows of 10 positions cannot be cut into two pieces for each of 2 devices"),
        ({"queries": 16, "keys": 32}, 3, "flash_attention_block_size=3 does not divide the 8 positions of half a"),
        ({"queries": 2 * 521, "keys": 4 * 521}, None, "no block of 64 to 512 positions divides the 521 of half a"),
    ],
)
def test_a_ring_needs_rows_that_can_be_cut(site: Any, size: int | None, reason: str):
    with pytest.raises(UserError, match=f"attn_backend: ring cannot be used: {reason}.*; write xla"):
        choose(scored(backend="ring", block_size=size), "cpu", **site)
    assert choose(scored(backend="ring", block_size=size), "cpu", cached=True, queries=1, keys=9).backend == "xla"
    assert choose(scored(backend="ring"), "cpu", queries=8, keys=32) == BackendChoice("ring", "asked for")


def brute_force(spec: AttentionSpec) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (Q, KEYS, V))
    out = np.zeros((B, S, N, H))
    for b, s, n in np.ndindex(B, S, N):
        first = max(0, s + 1 - (spec.window or S))
        visible = [t for t in range(first, s + 1) if SEGMENTS[b, t] == SEGMENTS[b, s]]
        scores = np.array([q[b, s, n] @ k[b, t, n // (N // K)] for t in visible])
        if (cap := spec.scores.softcap) is not None:
            scores = cap * np.tanh(scores / cap)
        p = np.exp(scores - scores.max())
        sink = np.exp(float(SINKS[n]) - scores.max()) if spec.sinks else 0.0
        out[b, s, n] = p / (p.sum() + sink) @ v[b, visible, n // (N // K)]
    return out


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, True), (2.0, False)])
def test_groups_windows_softcaps_sinks_and_blocks(block_size, softcap, sinks):
    scores = ScoreSpec(softcap=softcap, block_size=block_size)
    spec = AttentionSpec(N, H, num_kv_heads=K, window=3, scores=scores, sinks=sinks)
    options = {"sinks_N": SINKS} if sinks else {}
    program = jax.jit(lambda q, k, v, segments: dispatch_attention(spec, q, k, v, causal_bias(segments, 3), **options))
    actual = program(Q, KEYS, V, SEGMENTS)
    np.testing.assert_allclose(actual, brute_force(spec), atol=1e-5)


@pytest.mark.parametrize(("length", "window"), [(150, None), (600, None), (600, 40)])
def test_keys_that_no_query_of_a_block_sees_are_left_out_and_change_nothing(length: int, window: int | None):
    q, k, v = (jnp.asarray(RNG.standard_normal((1, length, heads, H)), jnp.float32) for heads in (N, K, K))
    segments = jnp.asarray([[0] * 100 + [1] * (length - 100)], jnp.int32)
    bias = jax.jit(causal_bias, static_argnums=1)(segments, window or 0)
    spec = AttentionSpec(N, H, num_kv_heads=K, window=window, scores=ScoreSpec(softcap=3.0), sinks=True)

    def gradients_and_flops(itself: bool):
        def loss(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
            known = segments if itself else None
            return jnp.sum(jnp.sin(dispatch_attention(spec, q, k, v, bias, segments_BS=known, sinks_N=sinks)))

        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(q, k, v, SINKS).compile()
        cost: Any = program.cost_analysis()
        return program(q, k, v, SINKS), (cost[0] if isinstance(cost, list) else cost)["flops"]

    (unblocked, all_flops), (blocks, flops) = gradients_and_flops(itself=False), gradients_and_flops(itself=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=2e-4, rtol=1e-5), unblocked, blocks)
    assert flops < (0.95 if length < 200 else 0.75) * all_flops


def test_blocks_have_the_gradients_of_the_whole_and_keep_no_scores():
    bias = causal_bias(SEGMENTS)

    def loss(block_size: int | None):
        spec = AttentionSpec(N, H, num_kv_heads=K, scores=ScoreSpec(block_size=block_size))
        return lambda q, k, v: jnp.sum(jnp.sin(dispatch_attention(spec, q, k, v, bias)))

    unblocked, blocks = (jax.jit(jax.grad(loss(size), argnums=(0, 1, 2)))(Q, KEYS, V) for size in (None, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-5), unblocked, blocks)

    def num_saved(size: int | None) -> int:
        _, backward = jax.eval_shape(lambda *args: jax.vjp(loss(size), *args), Q, KEYS, V)
        return max(leaf.size for leaf in jax.tree.leaves(backward))

    assert num_saved(None) >= B * N * S * S
    assert num_saved(4) < B * N * S * S
