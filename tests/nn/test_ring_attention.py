"""Attention in a ring of devices, against a formula in NumPy and against attention of whole rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lm_trainer.nn.attention import Reach, attend, causal_bias, make_context
from lm_trainer.nn.attention_dispatch import dispatch_attention
from lm_trainer.nn.positions import alibi_bias, alibi_slopes
from lm_trainer.nn.ring_attention import RowMetadata, ring_attention
from lm_trainer.nn.ring_layout import RingLayout, from_zigzag, to_zigzag
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec, BlockSpec, MlpSpec, ScoreSpec
from lm_trainer.parallel.collectives import all_gather
from tests.compiling import quick_jit

B, T, N, K, H = 2, 48, 4, 2, 8
RNG = np.random.default_rng(0)
Q, KEYS, V, DO = (jnp.asarray(RNG.standard_normal((B, T, heads, H)), jnp.float32) for heads in (N, K, K, N))
# Documents that end inside and at the border of blocks and chunks, and padding.
SEGMENTS = jnp.asarray([[0] * 5 + [1] * 19 + [2] * 1 + [3] * 23, [0] * 41 + [-1] * 7], jnp.int32)
POSITIONS = jnp.asarray([[*range(5), *range(19), 0, *range(23)], [*range(41), *range(7)]], jnp.int32)
SHARDED: Any = PartitionSpec(None, "context")


def spec_of(block_size: int | None = 3, *, window: int | None = None, alibi: bool = False, **scores: Any):
    positions = AlibiSpec() if alibi else None
    scored = ScoreSpec(block_size=block_size, backend="ring", **scores)
    return AttentionSpec(N, H, num_kv_heads=K, positions=positions, window=window, scores=scored)


def in_a_ring(spec: AttentionSpec, devices: int, key: jax.Array | None = None) -> Any:
    """A function of queries, keys, values and any sinks, whole on the outside, that `devices` compute together."""

    def part(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array, *sinks: jax.Array
    ) -> jax.Array:
        q, k, v, segments, positions = map(to_zigzag, (q, k, v, segments, positions))
        places = RowMetadata(
            segments, all_gather(segments, "context", 1), positions, all_gather(positions, "context", 1)
        )
        return from_zigzag(ring_attention(spec, q, k, v, places, key, sinks_N=sinks[0] if sinks else None))

    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    in_specs = (SHARDED,) * 5 + (PartitionSpec(),) * spec.sinks
    sharded_attention = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=SHARDED, check_vma=False)
    if spec.sinks:
        return lambda q, k, v, sinks: sharded_attention(q, k, v, SEGMENTS, POSITIONS, sinks)
    return lambda q, k, v, segments=SEGMENTS, positions=POSITIONS: sharded_attention(q, k, v, segments, positions)


def brute_force(spec: AttentionSpec) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (Q, KEYS, V))
    segments = np.asarray(SEGMENTS)
    slopes = alibi_slopes(AlibiSpec(), N) if spec.positions else np.zeros(N)
    out = np.zeros((B, T, N, H))
    for b, s, n in np.ndindex(B, T, N):
        first = max(0, s + 1 - (spec.window or T))
        visible = np.array([t for t in range(first, s + 1) if segments[b, t] == segments[b, s]])
        scores = np.array([q[b, s, n] @ k[b, t, n // (N // K)] for t in visible])
        if (cap := spec.scores.softcap) is not None:
            scores = cap * np.tanh(scores / cap)
        p = np.exp(scores - slopes[n] * (s - visible))
        out[b, s, n] = p / p.sum() @ v[b, visible, n // (N // K)]
    return out


def on_one_device(spec: AttentionSpec):
    bias = causal_bias(SEGMENTS, spec.window or 0)
    if isinstance(spec.positions, AlibiSpec):
        bias = bias + alibi_bias(spec.positions, N, POSITIONS[:, :, None] - POSITIONS[:, None, :])
    scores = ScoreSpec(softcap=spec.scores.softcap)
    unsharded_spec = AttentionSpec(N, H, num_kv_heads=K, scores=scores, sinks=spec.sinks)
    return lambda q, k, v, *sinks: dispatch_attention(
        unsharded_spec, q, k, v, bias, sinks_N=sinks[0] if sinks else None
    )


def result_and_gradients(attention: Any, *arrays: jax.Array) -> Any:
    def both(*arrays: jax.Array) -> Any:
        out, back = jax.vjp(attention, *arrays)
        return out, back(DO)

    return quick_jit(both)(*(arrays or (Q, KEYS, V)))


@functools.cache
def reference(spec: AttentionSpec) -> Any:
    """The result by the formula, and the gradients of whole rows on one device; neither knows of blocks."""
    return brute_force(spec), result_and_gradients(on_one_device(spec))[1]


@pytest.mark.parametrize(
    ("devices", "spec"),
    [
        (1, spec_of()),
        pytest.param(2, spec_of(4), marks=pytest.mark.slow),
        (3, spec_of(None)),
        (4, spec_of(2, alibi=True, softcap=2.0)),
        (8, spec_of(1)),
        (4, spec_of(2, window=1)),
        pytest.param(8, spec_of(3, window=3), marks=pytest.mark.slow),
        (4, spec_of(3, window=10)),
        (2, spec_of(4, window=30, softcap=1.5)),
    ],
    ids=lambda value: f"{value.window}-{value.scores.block_size}" if isinstance(value, AttentionSpec) else None,
)
def test_a_ring_has_the_results_and_gradients_of_whole_rows(devices: int, spec: AttentionSpec):
    out, gradients = result_and_gradients(in_a_ring(spec, devices))
    expected = reference(dataclasses.replace(spec, scores=dataclasses.replace(spec.scores, block_size=None)))
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected[1])


def test_sinks_join_the_softmax_of_all_devices_once():
    spec = dataclasses.replace(spec_of(3, window=10), sinks=True)
    arrays = (Q, KEYS, V, jnp.asarray([-2.0, 0.0, 1.0, 4.0]))
    actual, expected = (result_and_gradients(f, *arrays) for f in (in_a_ring(spec, 4), on_one_device(spec)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


def test_scores_of_narrow_numbers_are_float32():
    narrow = tuple(np.asarray(x).astype(jnp.bfloat16) for x in (Q, KEYS, V))
    out = quick_jit(in_a_ring(spec_of(), 4))(*narrow)
    assert out.dtype == jnp.bfloat16
    expected = quick_jit(on_one_device(spec_of()))(*(x.astype(np.float32) for x in narrow))
    # Probabilities and the result are rounded, by up to 2^-9 each; scores are not.
    np.testing.assert_allclose(np.float32(out), expected, atol=2**-7 * np.abs(expected).max())


def test_its_gradient_has_the_derivative_of_whole_rows():
    def product(attention: Any) -> Any:
        gradient = jax.grad(lambda q, k, v: jnp.vdot(jnp.square(attention(q, k, v)), DO), argnums=(0, 1, 2))
        return quick_jit(lambda *arrays: jax.jvp(gradient, arrays, (V.repeat(2, 2), V, KEYS))[1])(Q, KEYS, V)

    spec = spec_of(4, softcap=2.0)
    actual, expected = product(in_a_ring(spec, 1)), product(on_one_device(spec))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max()), actual, expected)


@pytest.mark.slow
def test_probabilities_are_dropped_alike_in_both_passes():
    spec, key = spec_of(dropout=0.25), jax.random.key(1)
    ring = in_a_ring(spec, 4, key)
    out, (dq, dk, dv) = result_and_gradients(ring)
    # The result is linear in the values: its product with a cotangent is that of the values with their gradient.
    assert np.vdot(out, DO) == pytest.approx(float(np.vdot(V, dv)), rel=1e-4)
    step = 1e-2
    moved = quick_jit(lambda q, k: jnp.vdot(ring(q, k, V), DO))
    queries, keys = np.asarray(Q), np.asarray(KEYS)
    for expected, (q, k) in {np.vdot(dq, Q): (queries, 0 * keys), np.vdot(dk, KEYS): (0 * queries, keys)}.items():
        after, before = (float(moved(queries + way * q, keys + way * k)) for way in (step, -step))
        assert (after - before) / (2 * step) == pytest.approx(float(expected), rel=5e-3)
    # Where a query sees nothing but itself, a quarter of the heads have 0, and the others 4/3 of the value.
    alone = quick_jit(in_a_ring(spec_of(dropout=0.25, window=1), 4, key))(Q, KEYS, np.ones_like(V))
    assert set(np.unique(np.asarray(alone))) == {0.0, np.float32(4 / 3)}
    assert np.mean(np.asarray(alone) == 0) == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize("window", [None, 8])
def test_devices_compute_the_same_number_of_blocks_and_none_that_are_hidden(window: int | None):
    devices, size = 3, 4
    spec, blocks = spec_of(size, window=window), T // size
    ring, one_document = quick_jit(in_a_ring(spec, devices)), np.zeros((B, T), np.int32)
    computed = np.zeros((blocks, blocks), bool)
    for block in range(blocks):
        # What is not a number in a block of keys shows in every block of queries that looks at it at all.
        poisoned = np.array(V)
        poisoned[:, block * size : (block + 1) * size] = np.nan
        is_nan = np.isnan(np.asarray(ring(Q, KEYS, poisoned, one_document, one_document)))
        computed[:, block] = is_nan.reshape(B, blocks, -1).any((0, 2))
    indices = np.arange(blocks)
    distance = indices[:, None] - indices[None, :]
    assert (computed == ((distance >= 0) & (distance <= (blocks if window is None else 2)))).all()
    layout = RingLayout.for_rows(spec, T // devices, devices)
    of_device = [computed[[*range(2 * d, 2 * d + 2), *range(10 - 2 * d, 12 - 2 * d)]].sum() for d in range(devices)]
    assert of_device == [layout.num_computed_blocks(d) for d in range(devices)]
    if window is None:
        assert len(set(of_device)) == 1


@pytest.mark.parametrize(("devices", "length"), [(2, 2**13), (8, 2**17), (16, 2**17)])
def test_half_of_all_pairs_is_computed_by_each_device_alike(devices: int, length: int):
    layout = RingLayout.for_rows(spec_of(None), length // devices, devices)
    (blocks,) = {layout.num_computed_blocks(device) for device in range(devices)}
    share = devices * blocks * layout.size**2 / length**2
    assert share == pytest.approx(0.5 * (1 + layout.size / length))
    near = RingLayout.for_rows(spec_of(None, window=1024), length // devices, devices)
    counts = [near.num_computed_blocks(device) for device in range(devices)]
    # The first positions of a row see less than their window.
    assert max(counts) - min(counts) <= 3
    assert devices * max(counts) * near.size**2 < 1.8 * 1024 * length


def test_keys_go_no_further_than_windows_reach():
    far = RingLayout.for_rows(spec_of(4, window=9), 8, 6)
    assert far.routes() == [(1, 0, 2), (-1, 1, 2)]
    assert RingLayout.for_rows(spec_of(4, window=5), 8, 6).routes() == [(1, 0, 1), (-1, 1, 1)]
    assert RingLayout.for_rows(spec_of(4, window=1), 8, 6).routes() == [(1, 0, 0)]
    assert RingLayout.for_rows(spec_of(4), 8, 6).routes() == [(1, 0, 5)]


def test_no_array_has_all_pairs_and_no_keys_are_gathered():
    devices, length = 4, 1024
    shape = jax.ShapeDtypeStruct((1, length, K, H), jnp.float32)
    ints = jax.ShapeDtypeStruct((1, length), jnp.int32)

    ring = in_a_ring(spec_of(16), devices)
    loss = lambda q, k, v, *row: jnp.sum(jnp.sin(ring(q, k, v, *row)))  # noqa: E731
    queries = jax.ShapeDtypeStruct((1, length, N, H), jnp.float32)
    compiled = quick_jit(jax.grad(loss, argnums=(0, 1, 2))).lower(queries, shape, shape, ints, ints).compile()
    text = compiled.as_text()
    largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text))
    assert largest < length // devices * length
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * length // devices * length
    assert "collective-permute" in text
    assert not re.findall(r"= \(?f32\S* all-gather", text)


def test_chunks_of_documents_are_those_of_whole_rows() -> None:
    spec = dataclasses.replace(spec_of(3), chunk=7)
    block = BlockSpec(spec, MlpSpec(hidden_dim=8))

    def part(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        q, k, v, segments, positions = map(to_zigzag, (q, k, v, segments, positions))
        return from_zigzag(attend(spec, q, k, v, make_context((block,), positions, segments, ring=True), 0))

    mesh = Mesh(np.array(jax.devices()[:4]), ("context",))
    ring = jax.shard_map(part, mesh=mesh, in_specs=(SHARDED,) * 5, out_specs=SHARDED, check_vma=False)
    chunks = jnp.asarray(Reach(chunk=7).split_segments(SEGMENTS, POSITIONS, T))
    in_chunks = AttentionSpec(N, H, num_kv_heads=K)

    def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dispatch_attention(in_chunks, q / math.sqrt(H), k, v, causal_bias(chunks))

    for row, rows in enumerate(np.asarray(chunks)):
        ends = np.flatnonzero(np.diff(rows)) + 1
        documents = np.split(np.asarray(POSITIONS)[row], ends)
        assert all((piece // 7 == piece[0] // 7).all() for piece in documents)
    actual = result_and_gradients(lambda q, k, v: ring(q, k, v, SEGMENTS, POSITIONS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, result_and_gradients(whole))
