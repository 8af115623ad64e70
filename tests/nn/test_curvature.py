"""Estimates of curvature against the Hessian and the Gauss-Newton matrix, written out for a tiny decoder.

Shape letters: K draws, N tokens, V vocabulary, P parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from lm_trainer.core.batch import Batch
from lm_trainer.nn.curvature import gauss_newton_bartlett, hutchinson
from lm_trainer.nn.loss import token_loss
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, MlpSpec, NormSpec
from tests.nn.common import init, make_batch, make_spec

DRAWS = 2000
BLOCK = BlockSpec(AttentionSpec(num_heads=1, head_dim=3), MlpSpec(hidden_dim=4), pre_norm=NormSpec())
SPEC = make_spec(blocks=(BLOCK,), vocab_size=5, hidden_dim=3, num_positions=3)
BATCH = make_batch(2, 3, 5)


@functools.cache
def initial() -> tuple[Any, jax.Array, Any]:
    """The definition of the model, its flat parameters, and the function that gives them their shapes."""
    graphdef, params = init(SPEC)
    return graphdef, *ravel_pytree(params)


@pytest.fixture(autouse=True, scope="module")
def _initialised() -> None:
    """Makes the parameters before a function is traced, which would keep tracers of them."""
    initial()


def flat_params_P() -> jax.Array:
    return initial()[1]


def loss(model: Any, batch: Batch, key: jax.Array | None) -> tuple[Any, ...]:
    return token_loss(model, batch, key=key)


def model_of(flat_P: jax.Array) -> Any:
    graphdef, _, unravel = initial()
    return nnx.merge(graphdef, unravel(flat_P))


def draws(estimate: Any) -> np.ndarray:
    """[K, P]"""

    def one(key: jax.Array) -> jax.Array:
        return ravel_pytree(estimate(model_of(flat_params_P()), BATCH, key))[0]

    keys = jax.random.split(jax.random.key(1), DRAWS)
    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=200))(keys), np.float64)


@functools.cache
def hessian_PP() -> np.ndarray:
    def total(flat_P: jax.Array) -> jax.Array:
        log_p_BSV = jax.nn.log_softmax(model_of(flat_P)(BATCH.tokens, BATCH.positions, BATCH.segments))
        picked_BS = jnp.take_along_axis(log_p_BSV, jnp.asarray(BATCH.targets)[..., None], axis=-1)[..., 0]
        return -jnp.sum(picked_BS * BATCH.weights)

    return np.asarray(jax.jit(jax.hessian(total))(flat_params_P()), np.float64)


def gauss_newton_P() -> np.ndarray:
    """The expectation of the square of the gradient when each target is drawn: sum of w^2 times Fisher's diagonal."""

    def logits(flat_P: jax.Array) -> jax.Array:
        return model_of(flat_P)(BATCH.tokens, BATCH.positions, BATCH.segments).reshape(-1, 5)

    p_NV = np.asarray(jax.nn.softmax(logits(flat_params_P())), np.float64)
    j_NVP = np.asarray(jax.jit(jax.jacrev(logits))(flat_params_P()), np.float64)
    centred_NVP = j_NVP - np.einsum("nv,nvp->np", p_NV, j_NVP)[:, None]
    return np.einsum("n,nv,nvp->p", BATCH.weights.reshape(-1).astype(np.float64) ** 2, p_NV, centred_NVP**2)


@pytest.mark.slow
def test_hutchinson_finds_the_diagonal_of_the_hessian() -> None:
    h_PP = hessian_PP()
    variance_P = np.sum(h_PP**2, axis=1) - np.diag(h_PP) ** 2
    mean_P = draws(functools.partial(hutchinson, loss)).mean(axis=0)
    np.testing.assert_array_less(np.abs(mean_P - np.diag(h_PP)), 5 * np.sqrt(variance_P / DRAWS) + 1e-4)
    assert np.max(np.abs(np.diag(h_PP))) > 0.1


@pytest.mark.slow
def test_gauss_newton_bartlett_finds_the_diagonal_of_the_gauss_newton_matrix() -> None:
    squares_KP = draws(functools.partial(gauss_newton_bartlett, loss)) ** 2
    error_P = np.abs(squares_KP.mean(axis=0) - gauss_newton_P())
    np.testing.assert_array_less(error_P, 5 * squares_KP.std(axis=0) / np.sqrt(DRAWS) + 1e-4)
    assert np.max(gauss_newton_P()) > 0.1


@pytest.mark.slow
def test_targets_are_drawn_in_blocks_of_tokens_too() -> None:
    in_blocks = draws(functools.partial(gauss_newton_bartlett, loss, block_size=4))
    expected = gauss_newton_P()
    error_P = np.abs((in_blocks**2).mean(axis=0) - expected)
    np.testing.assert_array_less(error_P, 5 * (in_blocks**2).std(axis=0) / np.sqrt(DRAWS) + 1e-4)


@pytest.mark.parametrize("estimate", [hutchinson, gauss_newton_bartlett])
def test_an_estimate_depends_on_its_key_alone(estimate: Any) -> None:
    estimated = jax.jit(lambda key: ravel_pytree(estimate(loss, model_of(flat_params_P()), BATCH, key))[0])

    def one(seed: int) -> np.ndarray:
        return np.asarray(estimated(jax.random.key(seed)))

    np.testing.assert_array_equal(one(3), one(3))
    assert not np.allclose(one(3), one(4))


def test_targets_of_the_batch_do_not_matter_to_gauss_newton_bartlett() -> None:
    other = BATCH._replace(targets=(np.asarray(BATCH.targets) + 1) % 5)
    estimated = jax.jit(lambda batch: gauss_newton_bartlett(loss, model_of(flat_params_P()), batch, jax.random.key(0)))
    one, two = estimated(BATCH), estimated(other)
    jax.tree.map(np.testing.assert_array_equal, one, two)
