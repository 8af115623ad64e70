"""Matrix factorizations of stacked matrices, which are computed one matrix at a time on CPUs.

On CPUs these are LAPACK calls. JAX 0.10 splits a call on several matrices into tasks for the thread pool that also runs
the call, and blocks the thread until they are done. If all threads of the pool block, no thread is left for the tasks
and the program hangs. A call on a single matrix runs in its own thread. JAX 0.11 and later call LAPACK for one matrix
after another, so they lose no speed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def eigenvectors(matrices_KNN: jax.Array) -> jax.Array:
    """Returns the eigenvectors of symmetric matrices as columns, by increasing eigenvalue, [K, N, N]."""
    return _each_matrix(lambda matrices: jnp.linalg.eigh(matrices)[1], matrices_KNN)


def orthonormal_columns(matrices_KMN: jax.Array) -> jax.Array:
    """Returns orthonormal columns, the first n of which span the first n columns of a matrix, [K, M, min(M, N)]."""
    return _each_matrix(lambda matrices: jnp.linalg.qr(matrices)[0], matrices_KMN)


def solve_upper_transposed(q_KII: jax.Array, x_KIO: jax.Array) -> jax.Array:
    """Returns Q^-T X for upper triangular Q by substitution, without computing an inverse, [K, I, O]."""

    def solve(q: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.linalg.triangular_solve(q, x, left_side=True, lower=False, transpose_a=True)

    return _each_matrix(solve, q_KII, x_KIO)


def _each_matrix(function: Callable[..., jax.Array], *stacks: jax.Array) -> jax.Array:
    """Calls `function` on one matrix of each stack at a time on CPUs, and on the whole stacks on other platforms."""

    def one_by_one(*stacks: jax.Array) -> jax.Array:
        return jax.lax.map(lambda matrices: function(*matrices), stacks)

    return jax.lax.platform_dependent(*stacks, cpu=one_by_one, default=function)
