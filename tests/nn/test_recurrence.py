"""Recurrences in chunks against their definition, position by position in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.nn.recurrence import (
    RecurrenceInputs,
    ShortConv,
    document_numbers,
    invert_unit_lower,
    run_recurrence,
)
from tests.compiling import quick_jit
from tests.nn.common import built, make_init

B, S, G, R, K, P = 2, 29, 2, 3, 5, 4
SEGMENTS = np.array([[0] * 3 + [1] * 14 + [2] + [3] * 11, [7] * 20 + [-1] * 9], np.int32)
RNG = np.random.default_rng(0)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


Q, KEYS, V = (RNG.standard_normal(shape) for shape in ((B, S, G, K), (B, S, G, K), (B, S, G, R, P)))
LOG_DECAY = -RNG.exponential(0.3, (B, S, G, R))
RATE = RNG.uniform(0.0, 1.0, (B, S, G, R))
STATE = RNG.standard_normal((B, G, R, K, P))


def step_by_step(*, delta: bool, segments: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    keys = unit(KEYS) if delta else KEYS
    out, state = np.zeros((B, S, G, R, P)), STATE.copy()
    for b in range(B):
        for t in range(S):
            if segments is not None and (t == 0 or segments[b, t] != segments[b, t - 1]):
                state[b] = 0.0
            for g in range(G):
                k, q = keys[b, t, g], Q[b, t, g]
                for r in range(R):
                    decayed = np.exp(LOG_DECAY[b, t, g, r]) * state[b, g, r]
                    v = V[b, t, g, r]
                    if delta:
                        v = RATE[b, t, g, r] * (v - decayed.T @ k)
                    state[b, g, r] = decayed + np.outer(k, v)
                    out[b, t, g, r] = state[b, g, r].T @ q
    return out, state


def arrays(*, delta: bool) -> RecurrenceInputs:
    keys = unit(KEYS) if delta else KEYS
    inputs = (Q, keys, V, LOG_DECAY, *((RATE,) if delta else ()))
    return RecurrenceInputs(*(jnp.asarray(x, jnp.float32) for x in inputs))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_chunks_of_any_size_compute_each_position(delta: bool, packed: bool) -> None:
    segments = SEGMENTS if packed else None
    expected = step_by_step(delta=delta, segments=segments)
    documents = document_numbers(None if segments is None else jnp.asarray(segments))
    for size in (1, 7, 16, 64):
        run = lambda inputs, state, documents, size=size: run_recurrence(inputs, state, documents, size)  # noqa: E731
        actual = quick_jit(run)(arrays(delta=delta), jnp.asarray(STATE, jnp.float32), documents)
        for x, y in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5, err_msg=str(size))


@pytest.mark.parametrize("delta", [False, True])
def test_gradients_do_not_depend_on_chunks(delta: bool) -> None:
    documents, state = document_numbers(jnp.asarray(SEGMENTS)), jnp.asarray(STATE, jnp.float32)

    def gradients(size: int) -> Any:
        loss = lambda inputs: jnp.sum(jnp.sin(run_recurrence(inputs, state, documents, size)[0]))  # noqa: E731
        return quick_jit(jax.grad(loss))(arrays(delta=delta))

    for x, y in zip(*(jax.tree.leaves(gradients(size)) for size in (1, 16)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("delta", [False, True])
def test_gradients_of_strong_decays_are_finite(delta: bool) -> None:
    """The state of one document has decayed to nothing, and the next one decays slowly."""
    first = np.where(SEGMENTS[:, :1] == SEGMENTS, 400.0, 1.0)[:, :, None, None]
    inputs = arrays(delta=delta)._replace(log_decay_BSGR=jnp.asarray(LOG_DECAY * first, jnp.float32))
    documents, state = document_numbers(jnp.asarray(SEGMENTS)), jnp.asarray(STATE, jnp.float32)
    loss = lambda inputs: jnp.sum(jnp.sin(run_recurrence(inputs, state, documents, 16)[0]))  # noqa: E731
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(quick_jit(jax.grad(loss))(inputs)))


def test_a_row_goes_on_from_the_state_of_another() -> None:
    inputs, state = arrays(delta=True), jnp.asarray(STATE, jnp.float32)
    whole = run_recurrence(inputs, state, None, 8)
    first, middle = run_recurrence(jax.tree.map(lambda x: x[:, :13], inputs), state, None, 8)
    second, end = run_recurrence(jax.tree.map(lambda x: x[:, 13:], inputs), middle, None, 8)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole[0], atol=1e-5)
    np.testing.assert_allclose(end, whole[1], atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 64])
def test_inverses_of_triangular_matrices(length: int) -> None:
    lower = np.tril(RNG.uniform(-1.0, 1.0, (3, length, length)), -1)
    # What stands on and above the diagonal is not read.
    given = jnp.asarray(lower + np.triu(RNG.standard_normal((length, length))), jnp.float32)
    inverse = np.asarray(invert_unit_lower(given), np.float64)
    expected = np.linalg.inv(np.eye(length) + lower)
    assert np.abs(inverse - expected).max() < 1e-4 * np.abs(expected).max()


def test_equal_keys_lose_no_precision() -> None:
    """The worst case of the triangular system: every position overwrites what the last one added."""
    ones = np.zeros((1, 64, 1, K), np.float32)
    ones[..., 0] = 1.0
    v = RNG.standard_normal((1, 64, 1, 1, P)).astype(np.float32)
    rate, log_decay = np.ones((1, 64, 1, 1), np.float32), np.zeros((1, 64, 1, 1), np.float32)
    inputs = RecurrenceInputs(*map(jnp.asarray, (ones, ones, v, log_decay, rate)))
    out, _ = run_recurrence(inputs, jnp.zeros((1, 1, 1, K, P)), None, 64)
    np.testing.assert_allclose(out, v, atol=1e-5)


def test_a_convolution_reads_its_own_document() -> None:
    width, x = 4, RNG.standard_normal((B, S, 2, 3)).astype(np.float32)
    conv = built(lambda: ShortConv({"heads": 2, "head_size": 3}, width=width, bias=True, init=make_init()))
    weight = np.asarray(conv.weight[...])[:, 0]
    expected = np.zeros_like(x)
    for t in range(S):
        for distance in range(width):
            for b in range(B):
                if t >= distance and SEGMENTS[b, t] == SEGMENTS[b, t - distance]:
                    expected[b, t] += weight[width - 1 - distance] * x[b, t - distance]
    expected = expected / (1.0 + np.exp(-expected))
    actual, _ = conv(jnp.asarray(x), document_numbers(jnp.asarray(SEGMENTS)), None, None)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_convolution_goes_on_from_its_history() -> None:
    x = jnp.asarray(RNG.standard_normal((2, 12, 3)), jnp.float32)
    conv = built(lambda: ShortConv({"mlp": 3}, width=4, bias=False, init=make_init()))
    whole, _ = conv(x, None, None, None)
    counts = jnp.array([5, 2])
    first, history = conv(x[:, :7], None, jnp.zeros((2, 3, 3)), counts)
    following = jnp.stack([x[0, 5:10], x[1, 2:7]])
    second, _ = conv(following, None, history, None)
    np.testing.assert_allclose(first[0, :5], whole[0, :5], atol=1e-6)
    np.testing.assert_allclose(second[0], whole[0, 5:10], atol=1e-6)
    np.testing.assert_allclose(second[1], whole[1, 2:7], atol=1e-6)
