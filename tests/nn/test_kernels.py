"""Kernels of other hardware: their numbers where an interpreter can run them, and that they lower for it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn import cudnn_attention, splash_attention
from lm_trainer.nn.attention import Attention, causal_bias, make_context
from lm_trainer.nn.attention_dispatch import dispatch_attention
from lm_trainer.nn.attention_kernel import AttentionInputs
from lm_trainer.nn.curvature import hutchinson
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import AttentionSpec, Backend, BlockSpec, DecoderSpec, MlpSpec, Remat, ScoreSpec
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.parallel.target_platform import compiling_for
from tests.nn.common import make_init

B, S = 2, 256
SEGMENTS = jnp.asarray(np.stack([np.repeat([0, 1, -1], [100, 130, 26]), np.zeros(S)]), jnp.int32)
AttentionFn = Callable[..., jax.Array]


def operands(spec: AttentionSpec, dtype: Any, length: int = S) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    heads = (spec.num_heads, spec.kv_heads, spec.kv_heads)
    q, k, v = (rng.standard_normal((B, length, n, spec.head_dim)) for n in heads)
    return [jnp.asarray(x.astype(dtype)) for x in (2 * spec.head_dim**-0.5 * q, k, v)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dtype", "length", "tolerance"),
    [
        (AttentionSpec(4, 64, num_kv_heads=2, window=70, scores=ScoreSpec(softcap=3.0)), jnp.float32, S, 3e-6),
        (AttentionSpec(2, 128, num_kv_heads=1, scores=ScoreSpec(block_size=128)), jnp.bfloat16, S, 1e-2),
        (AttentionSpec(4, 64, num_kv_heads=2, window=70, sinks=True), jnp.float32, S, 3e-6),
        (AttentionSpec(4, 64, num_kv_heads=2, sinks=True), jnp.bfloat16, S, 2e-2),
        # Six blocks are more than the parts of a gradient that one kernel writes.
        (AttentionSpec(2, 8, num_kv_heads=1, scores=ScoreSpec(block_size=128)), jnp.float32, 3 * S, 3e-6),
        (AttentionSpec(1, 8, window=200, scores=ScoreSpec(block_size=128)), jnp.float32, 3 * S, 3e-6),
        (AttentionSpec(1, 8, scores=ScoreSpec(block_size=768)), jnp.float32, 6 * S, 3e-6),
    ],
    ids=[
        "window, softcap, groups, narrow heads",
        "one head of keys, blocks, bfloat16",
        "sinks, window",
        "sinks, bfloat16",
        "more keys in a block of the gradient than of queries",
        "a kernel for each gradient",
        "more keys in a block than are computed at once",
    ],
)
def test_splash_has_the_values_and_gradients_of_xla(spec, dtype, length, tolerance):
    segments = jnp.asarray(np.tile(SEGMENTS, (1, length // S)))

    def results(attention: AttentionFn) -> Any:
        def loss(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            o_BSNH = attention(*operands)
            return jnp.sum(jnp.sin(o_BSNH.astype(jnp.float32))), o_BSNH

        sinks = [jnp.linspace(-1.0, 3.0, spec.num_heads)] * spec.sinks
        run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(3 + spec.sinks)), has_aux=True))
        (_, o_BSNH), grads = run(*operands(spec, dtype, length), *sinks)
        return jax.tree.map(lambda x: np.asarray(x, np.float32), (o_BSNH, *grads))

    plain = dataclasses.replace(spec, scores=dataclasses.replace(spec.scores, block_size=None))
    expected = results(
        lambda q, k, v, sinks=None: dispatch_attention(
            plain, q, k, v, causal_bias(segments, spec.window or 0), sinks_N=sinks
        )
    )
    # The kernel has masks of its own: if it read this bias, everything would be nan.
    unread = jnp.asarray(np.full((1, 1, length, length), np.nan, np.float32))
    actual = results(
        lambda q, k, v, sinks=None: splash_attention.compute(
            spec, AttentionInputs(q, k, v, unread, segments, sinks), interpret=True
        )
    )
    for a, b in zip(expected, actual, strict=True):
        assert np.linalg.norm(b - a) < tolerance * np.linalg.norm(a)


@pytest.mark.slow
def test_splash_is_divided_over_a_mesh():
    mesh = build_mesh(MeshShape(model=2), jax.devices()[:4])
    spec = AttentionSpec(2, 8, scores=ScoreSpec(block_size=128))
    qkv = [np.asarray(x)[:, :128] for x in operands(spec, jnp.float32)]
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss(compute: AttentionFn) -> AttentionFn:
        # All of it, and then one row and one head alone, which the mesh does not divide.
        def both(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
            all_rows, part = compute(q, k, v, segments), compute(*(x[:1, :, :1] for x in (q, k, v)), segments[:1])
            return jnp.sum(jnp.sin(all_rows)) + jnp.sum(jnp.cos(part))

        return both

    def by_splash(*args: jax.Array) -> jax.Array:
        q_BSNH, k_BSKH, v_BSKH, segments_BS = args
        return splash_attention.compute(
            spec, AttentionInputs(q_BSNH, k_BSKH, v_BSKH, q_BSNH, segments_BS), interpret=True
        )

    args = [*qkv, np.asarray(SEGMENTS)[:, :128]]
    plain = jax.jit(
        jax.grad(loss(lambda q, k, v, s: dispatch_attention(spec, q, k, v, causal_bias(s))), argnums=(0, 1, 2))
    )(*args)
    divided = jax.jit(jax.grad(loss(by_splash), argnums=(0, 1, 2)))(*jax.device_put(args, rows))
    assert "data" in divided[0].sharding.spec[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=2e-5), plain, divided)


def lowered(spec: AttentionSpec, platform: str, dtype: Any = jnp.bfloat16) -> str:
    """The gradient of an attention module, as it is handed to the platform's compiler."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Attention(spec, 32, init=make_init())))
    block = BlockSpec(spec, MlpSpec(8))

    def loss(x_BSD: jax.Array, params: Any) -> jax.Array:
        context = make_context((block,), jnp.zeros((B, S), jnp.int32), SEGMENTS)
        return jnp.sum(nnx.merge(graph, params)(x_BSD, context, 0)[0].astype(jnp.float32))

    x = jax.ShapeDtypeStruct((B, S, 32), dtype)
    return jax.jit(jax.grad(loss)).trace(x, params).lower(lowering_platforms=(platform,)).as_text()


def spec_for(backend: Backend, **scores: Any) -> AttentionSpec:
    return AttentionSpec(4, 64, num_kv_heads=2, window=70, scores=ScoreSpec(backend=backend, **scores))


def test_splash_lowers_for_tpus(monkeypatch):
    # `auto` goes by the platform of the process, and not by the one that is lowered for.
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    text = lowered(spec_for("auto", softcap=3.0), "tpu")
    assert text.count("@tpu_custom_call") == 2, "forward, and one backward for all gradients"
    with pytest.raises(UserError, match="splash cannot be used: it has no dropout"):
        lowered(spec_for("splash", dropout=0.1), "tpu")


def test_an_optimizer_that_differentiates_twice_takes_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    rows = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def estimate(backend: Backend, tokens_BS: jax.Array) -> Any:
        block = BlockSpec(AttentionSpec(1, 8, scores=ScoreSpec(backend=backend)), MlpSpec(8))
        model = Decoder(DecoderSpec(16, 8, 128, (block,)), rngs=nnx.Rngs(0))
        batch = Batch(tokens_BS, tokens_BS, tokens_BS, tokens_BS, tokens_BS)

        def loss(model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array]:
            del key
            return (jnp.sum(model(batch.tokens, batch.positions, batch.segments)),)

        return hutchinson(loss, model, batch, jax.random.key(0))

    jax.eval_shape(functools.partial(estimate, "xla"), rows)
    jax.eval_shape(functools.partial(estimate, "auto"), rows)
    with pytest.raises(UserError, match="splash cannot be used: its gradient has no derivative, which sophia-h takes"):
        jax.eval_shape(functools.partial(estimate, "splash"), rows)


def test_cudnn_lowers_for_nvidia_gpus(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # It is all that needs a GPU before the program is compiled.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    text = lowered(spec_for("auto"), "cuda")
    assert "@__cudnn$fmhaScaleBiasSoftmax(" in text
    assert "@__cudnn$fmhaScaleBiasSoftmaxBackward(" in text
    assert len(re.findall(r'mask_type[^,]*"CAUSAL', text.replace("\\22", '"'))) == 2, "hidden blocks are left out"


@pytest.mark.parametrize(("documents", "mask", "runs"), [(1, "CAUSAL", 1), (3, "PADDING_CAUSAL", 4)])
def test_cudnn_takes_lengths_of_documents_instead_of_a_bias(monkeypatch, documents: int, mask: str, runs: int):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    text = lowered(spec_for("auto", max_documents=documents), "cuda").replace("\\22", '"')
    assert "@__cudnn$fmhaSoftmax(" in text
    assert "@__cudnn$fmhaSoftmaxBackward(" in text
    assert "Bias" not in text
    assert len(re.findall(rf'mask_type": "{mask}"', text)) == 2
    assert len(re.findall(rf'max_seg_per_batch": {runs},', text)) == 2
    assert len(re.findall(r'sliding_window_length": 70,', text)) == 2


def attend_by_lengths(q: Any, k: Any, v: Any, offsets: Any, lengths: Any, *, window: int | None) -> jax.Array:
    """Attention of scaled queries inside the documents that offsets and lengths describe, as JAX documents them."""
    out = np.full(q.shape, np.nan, np.float32)
    for row, firsts, sizes in zip(range(len(q)), np.asarray(offsets), np.asarray(lengths), strict=True):
        for first, size in zip(firsts, sizes, strict=False):
            if first < 0:
                continue
            q_SNH, k_SNH, v_SNH = (np.asarray(x[row, first : first + size], np.float64) for x in (q, k, v))
            k_SNH, v_SNH = (x.repeat(q.shape[2] // k.shape[2], axis=1) for x in (k_SNH, v_SNH))
            distance = np.arange(size)[:, None] - np.arange(size)
            scores_NST = np.einsum("snh,tnh->nst", q_SNH, k_SNH)
            scores_NST[:, (distance < 0) | (distance >= (window or size))] = -np.inf
            weights_NST = np.exp(scores_NST - scores_NST.max(-1, keepdims=True))
            weights_NST /= weights_NST.sum(-1, keepdims=True)
            out[row, first : first + size] = np.einsum("nst,tnh->snh", weights_NST, v_SNH)
    return jnp.asarray(out, q.dtype)


@pytest.mark.parametrize("window", [None, 70])
def test_lengths_of_documents_give_the_values_of_a_bias(monkeypatch, window: int | None):
    monkeypatch.setattr(cudnn_attention, "attend_to_documents", attend_by_lengths)
    spec = AttentionSpec(4, 64, num_kv_heads=2, window=window, scores=ScoreSpec(max_documents=2))
    q, k, v = operands(spec, jnp.float32)
    unread = jnp.full((1, 1, S, S), jnp.nan)
    actual = cudnn_attention.compute(spec, AttentionInputs(q, k, v, unread, SEGMENTS))
    expected = dispatch_attention(spec, q, k, v, causal_bias(SEGMENTS, window or 0), segments_BS=SEGMENTS)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    unfit = cudnn_attention.compute(spec, AttentionInputs(q, k, v, unread, SEGMENTS.at[0, 50].set(-1)))
    assert np.isnan(unfit[0]).all()
    np.testing.assert_array_equal(unfit[1], actual[1])


def test_a_single_document_may_end_in_padding(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **_options: jnp.ones_like(q))
    spec = AttentionSpec(4, 64, num_kv_heads=2, scores=ScoreSpec(max_documents=1))
    q, k, v = operands(spec, jnp.bfloat16)
    actual = cudnn_attention.compute(spec, AttentionInputs(q, k, v, q, SEGMENTS.at[1, 200:].set(-1)))
    assert np.isnan(np.asarray(actual[0], np.float32)).all(), "two documents"
    assert np.array_equal(actual[1], np.ones_like(actual[1]))


def test_rows_fit_if_their_documents_are_runs():
    rows = list(itertools.product((-1, 0, 1), repeat=5))

    def fits(row: tuple[int, ...], runs: int) -> bool:
        parts = [number for number, _ in itertools.groupby(row)]
        documents = [number for number in parts if number >= 0]
        if runs == 1:
            return len(documents) == 0 or (documents == parts[:1] == documents[:1] and len(documents) == 1)
        return len(parts) <= runs and documents == sorted(set(documents))

    for runs in (1, 2, 3, 4):
        actual = cudnn_attention.fits_in_runs(jnp.asarray(rows, jnp.int32), runs)
        assert actual.tolist() == [fits(row, runs) for row in rows]


@pytest.mark.parametrize("window", [None, 70])
def test_cudnn_is_asked_for_the_values_of_xla(monkeypatch, window: int | None):
    real_attention = functools.partial(jax.nn.dot_product_attention)
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *a, **kw: real_attention(*a, **{**kw, "implementation": "xla"})
    )
    spec = AttentionSpec(4, 64, num_kv_heads=2, window=window)

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        bias = causal_bias(SEGMENTS, window or 0)
        actual = cudnn_attention.compute(spec, AttentionInputs(q, k, v, bias, SEGMENTS))
        return actual, dispatch_attention(spec, q, k, v, bias, segments_BS=SEGMENTS)

    actual, expected = jax.jit(both)(*operands(spec, jnp.bfloat16))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (actual, expected)), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("remat", "kernels"), [("full", 3), ("dots_no_batch", 2), ("dots", 2)])
def test_a_kernel_runs_twice_only_where_all_is_computed_again(remat: Remat, kernels: int):
    block = BlockSpec(AttentionSpec(1, 8, scores=ScoreSpec(backend="splash")), MlpSpec(8))
    model = nnx.eval_shape(lambda: Decoder(DecoderSpec(16, 8, 128, (block,), remat=remat), rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def loss(params: Any, tokens_BS: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params)(tokens_BS, tokens_BS, tokens_BS))

    with compiling_for("tpu"):
        traced = jax.jit(jax.grad(loss)).trace(params, jax.ShapeDtypeStruct((1, 128), jnp.int32))
        assert traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call") == kernels
