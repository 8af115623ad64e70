from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.generate.sampling import filter_logits, sample_tokens


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def brute_force(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities of one row, token by token, in float64."""
    logits = logits.astype(np.float64) / temperature
    order = np.argsort(-logits)
    candidates = list(order[: top_k or None])
    probs = dict(zip(candidates, softmax(logits[candidates]), strict=True))
    nucleus, total = [], 0.0
    for token in candidates:
        nucleus.append(token)
        total += probs[token]
        if total >= top_p:
            break
    out = np.zeros(len(logits))
    out[nucleus] = softmax(logits[nucleus])
    return out


@functools.partial(jax.jit, static_argnames="top_k")
def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> jax.Array:
    return jax.nn.softmax(filter_logits(jnp.asarray(logits), temperature=temperature, top_k=top_k, top_p=top_p))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 4, 100])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.77, 1.0])
def test_filter(temperature, top_k, top_p):
    logits = 3 * np.random.default_rng(0).standard_normal((5, 23)).astype(np.float32)
    actual = probabilities(logits, temperature, top_k, top_p)
    for row, probs in zip(logits, np.asarray(actual), strict=True):
        np.testing.assert_allclose(probs, brute_force(row, temperature, top_k, top_p), atol=1e-6)


def test_top_p_is_of_the_distribution_after_temperature_and_top_k():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    count = lambda **kw: int(jnp.isfinite(filter_logits(logits, **kw)).sum())  # noqa: E731
    assert count(temperature=1.0, top_k=0, top_p=0.65) == 2
    assert count(temperature=0.25, top_k=0, top_p=0.65) == 1
    assert count(temperature=1.0, top_k=3, top_p=0.85) == 3
    assert count(temperature=1.0, top_k=3, top_p=0.75) == 2


def test_ties_are_kept():
    logits = jnp.array([[1.0, 2.0, 1.0, 0.0]])
    filtered = filter_logits(logits, temperature=1.0, top_k=2, top_p=1.0)
    np.testing.assert_array_equal(jnp.isfinite(filtered), [[True, True, True, False]])


def test_both_zeros_tie():
    filtered = jax.jit(filter_logits, static_argnames="top_k")(
        jnp.asarray([[0.0, -0.0, -1.0, -0.0]]), temperature=1.0, top_k=0, top_p=0.2
    )
    np.testing.assert_array_equal(np.isfinite(filtered), [[True, True, False, True]])


def test_draws_follow_the_distribution():
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.2])), (20_000, 1))
    counts = np.bincount(sample_tokens(jax.random.split(jax.random.key(0), 20_000), logits), minlength=3) / 20_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=0.015)
