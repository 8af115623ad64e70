from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.nn import attention
from lm_trainer.nn.attention import Attention, Reach, cache_bias, causal_bias, make_context
from lm_trainer.nn.spec import AttentionSpec, PositionScaleSpec, ScoreSpec
from lm_trainer.nn.xla_attention import dot_product_attention
from tests.nn.common import BLOCK, built, context, make_init, weight_of

B, S, N, H = 2, 10, 3, 4
SEGMENTS = np.array([[0] * 4 + [1] * 5 + [-1], [7] * 10], np.int32)
SPEC = AttentionSpec(num_heads=N, head_dim=H)


def qkv(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, S, N, H), np.float32) for _ in range(3)]


def brute_force(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Query by query, in float64."""
    out = np.zeros_like(q, np.float64)
    for b in range(B):
        for s in range(S):
            visible = [t for t in range(s + 1) if segments[b, t] == segments[b, s]]
            for n in range(N):
                scores = np.array([q[b, s, n].astype(np.float64) @ k[b, t, n] for t in visible])
                p = np.exp(scores - scores.max())
                out[b, s, n] = (p / p.sum()) @ v[b, visible, n]
    return out


def test_causal_attention_inside_segments():
    q, k, v = qkv()
    out = dot_product_attention(jnp.asarray(3 * q), jnp.asarray(k), jnp.asarray(v), causal_bias(jnp.asarray(SEGMENTS)))
    np.testing.assert_allclose(out, brute_force(3 * q, k, v, SEGMENTS), atol=2e-6)


def test_large_scores_do_not_overflow():
    q, k, v = (jnp.asarray(a) for a in qkv())
    out = dot_product_attention(1e4 * q, k, v, causal_bias(jnp.asarray(SEGMENTS)))
    assert np.isfinite(out).all()


def test_dropout_of_probabilities_keeps_the_mean():
    q, k, v = (jnp.asarray(a) for a in qkv())
    bias = causal_bias(jnp.asarray(SEGMENTS))
    drop = jax.jit(jax.vmap(lambda key: dot_product_attention(q, k, v, bias, dropout_rate=0.3, key=key)))
    many = drop(jax.random.split(jax.random.key(0), 4000))
    assert np.abs(many[0] - many[1]).max() > 0.1
    np.testing.assert_allclose(many.mean(0), dot_product_attention(q, k, v, bias), atol=0.1)


def attend(spec: AttentionSpec, *, layer: int = 0) -> np.ndarray:
    module = built(lambda: Attention(spec, 16, init=make_init()))
    x = np.random.default_rng(1).standard_normal((B, S, 16)).astype(np.float32)
    return np.asarray(jax.jit(lambda x: module(x, context(SEGMENTS, spec), layer)[0])(x))


def test_scale_is_the_root_of_the_head_size_and_optionally_the_layer():
    wide = dataclasses.replace(SPEC, scores=ScoreSpec(inverse_layer=True))
    np.testing.assert_array_equal(attend(wide, layer=0), attend(SPEC, layer=0))
    np.testing.assert_array_equal(attend(SPEC, layer=3), attend(SPEC, layer=0))
    assert np.abs(attend(wide, layer=3) - attend(SPEC)).max() > 0.1


def test_the_first_token_of_a_segment_sees_itself_alone():
    module = built(lambda: Attention(SPEC, 16, init=make_init()))
    x = np.random.default_rng(1).standard_normal((B, S, 16)).astype(np.float32)
    values = module.v
    assert values is not None
    program = jax.jit(lambda x: (module(x, context(SEGMENTS, SPEC), 0)[0], module.out(values(x))))
    out, itself = map(np.asarray, program(x))
    np.testing.assert_allclose(out[:, 0], itself[:, 0], atol=1e-5)
    np.testing.assert_allclose(out[0, 4], itself[0, 4], atol=1e-5)


def test_upcast_keeps_scores_in_float32():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((B, S, N * H)), jnp.bfloat16)
    errors = {}
    for upcast in (False, True):
        spec = dataclasses.replace(SPEC, scores=ScoreSpec(upcast=upcast))
        module = built(lambda spec=spec: Attention(spec, N * H, init=make_init(2.0)))
        weight_of(module.out)[...] = jnp.eye(N * H).reshape(N, H, N * H)
        assert module.k is not None
        assert module.v is not None
        q, k, v = (np.asarray(linear(x), np.float32) for linear in (module.q, module.k, module.v))
        exact = brute_force(q / math.sqrt(H), k, v, SEGMENTS).reshape(B, S, N * H)
        errors[upcast] = (
            np.abs(np.asarray(module(x, context(SEGMENTS, SPEC), 0)[0], np.float32) - exact).mean()
            / np.abs(exact).mean()
        )
    # Scores near 100 are rounded to halves in bfloat16, which moves probabilities by half of themselves.
    assert errors[True] < 2**-8
    assert errors[False] > 3 * errors[True]


@pytest.mark.parametrize(("window", "chunk"), [(None, 4), (3, 4), (None, 20), (2, None)])
def test_a_query_sees_its_window_of_its_own_chunk_of_a_document(window: int | None, chunk: int | None) -> None:
    spec = dataclasses.replace(SPEC, window=window, chunk=chunk)
    positions = np.array([[*range(4), *range(5), 0], [*range(10)]])

    def is_visible(b: int, s: int, t: int) -> bool:
        p, q = positions[b, s], positions[b, t]
        near = window is None or s - t < window
        return bool(t <= s and SEGMENTS[b, s] == SEGMENTS[b, t] and near and p // (chunk or 99) == q // (chunk or 99))

    visible = np.array([[[is_visible(b, s, t) for t in range(S)] for s in range(S)] for b in range(B)])
    block = dataclasses.replace(BLOCK, mixer=spec)
    made = jax.jit(lambda *rows: make_context((block,), *rows))(positions.astype(np.int32), SEGMENTS)
    np.testing.assert_array_equal(np.asarray(made.biases_B1ST[Reach.from_spec(spec)])[:, 0] == 0, visible)
    q, k, v = qkv()
    actual = jax.jit(lambda q, k, v: attention.attend(spec, q, k, v, made, 0))(q, k, v)
    for b, s, n in np.ndindex(B, S, N):
        seen = np.flatnonzero(visible[b, s])
        p = np.exp([q[b, s, n].astype(np.float64) @ k[b, t, n] / math.sqrt(H) for t in seen])
        np.testing.assert_allclose(actual[b, s, n], p / p.sum() @ v[b, seen, n], atol=1e-5)


def test_a_cache_shows_the_chunk_of_a_new_position() -> None:
    bias = cache_bias(jnp.asarray([[5, 6], [3, 4]]), 8, Reach(window=3, chunk=4))
    seen = [[np.flatnonzero(row).tolist() for row in rows] for rows in np.asarray(bias)[:, 0] == 0]
    assert seen == [[[4, 5], [4, 5, 6]], [[1, 2, 3], [4]]]


def test_the_scale_of_scores_grows_with_positions() -> None:
    scale = PositionScaleSpec(interval=3, rate=0.5)
    spec = dataclasses.replace(SPEC, scores=ScoreSpec(position_scale=scale))
    segments = np.zeros((B, S), np.int32)
    q, k, v = qkv()
    factors = 1 + 0.5 * np.log(1 + np.floor((np.arange(S) + 1) / 3))
    actual = jax.jit(lambda q, k, v: attention.attend(spec, q, k, v, context(segments, spec), 0))(q, k, v)
    expected = brute_force(q * factors[None, :, None, None] / math.sqrt(H), k, v, segments)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
