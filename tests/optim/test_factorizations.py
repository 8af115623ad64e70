"""Matrix factorizations: on CPUs no LAPACK call on several matrices, and the bits of such a call."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.optim import OPTIMIZERS, OptimizerConfig
from lm_trainer.optim.factorizations import eigenvectors, orthonormal_columns, solve_upper_transposed
from tests.optim.common import FEW, gradients, initial

SCALARS = {name: np.float32(1) for name in ("learning_rate", "loss", "grad_norm")}
MATRICES_KNN = np.random.default_rng(0).standard_normal((5, 24, 24)).astype(np.float32)


def batched_lapack_calls(stablehlo: str) -> list[str]:
    """Returns the LAPACK calls of a lowered program with an operand of more than one matrix."""
    calls = re.findall(r"custom_call @lapack_.*: \(tensor.*", stablehlo)
    return [call for call in calls if re.search(r"tensor<(?!1x)\d+x\d+x\d+x", call)]


@pytest.mark.parametrize("member", OPTIMIZERS)
def test_no_optimizer_gives_lapack_several_matrices(member: type[OptimizerConfig]) -> None:
    # JAX 0.10 can hang in such a call. It needs all threads of XLA's pool at one time, so no run can prove its absence.
    tx = member().build(FEW)
    weights: Any = initial(FEW)
    state: Any = jax.eval_shape(tx.init, weights)
    update = jax.jit(tx.update).lower(gradients(0, FEW), state, weights, **SCALARS).as_text()
    assert not batched_lapack_calls(jax.jit(tx.init).lower(weights).as_text() + update)


def test_calls_on_several_matrices_are_recognised() -> None:
    qr = jax.jit(jnp.linalg.qr)
    assert batched_lapack_calls(qr.lower(MATRICES_KNN).as_text())
    assert not batched_lapack_calls(qr.lower(MATRICES_KNN[0]).as_text())


def test_bits_equal_one_call_on_all_matrices() -> None:
    symmetric_KNN = MATRICES_KNN + MATRICES_KNN.swapaxes(1, 2)
    expected = jax.jit(lambda x: jnp.linalg.eigh(x)[1])(symmetric_KNN)
    np.testing.assert_array_equal(jax.jit(eigenvectors)(symmetric_KNN), expected)

    tall_KMN = MATRICES_KNN[:, :, :7]
    expected = jax.jit(lambda x: jnp.linalg.qr(x)[0])(tall_KMN)
    np.testing.assert_array_equal(jax.jit(orthonormal_columns)(tall_KMN), expected)

    upper_KNN = np.triu(MATRICES_KNN) + 8 * np.eye(24, dtype=np.float32)
    solve = jax.jit(lambda q, x: jax.lax.linalg.triangular_solve(q, x, left_side=True, transpose_a=True))
    expected = solve(upper_KNN, tall_KMN)
    np.testing.assert_array_equal(jax.jit(solve_upper_transposed)(upper_KNN, tall_KMN), expected)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_get_all_matrices_at_once(platform: str) -> None:
    lowered = jax.jit(orthonormal_columns).trace(MATRICES_KNN).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" not in lowered
    assert re.search(r"custom_call @.*tensor<5x24x24xf32>", lowered)
