"""The update of Dion.

Shape letters: L stacked matrices of one parameter, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.optim.factorizations import orthonormal_columns
from lm_trainer.optim.matrices import is_matrix
from lm_trainer.optim.params import Arrays, Param, Params


class DionState(NamedTuple):
    """State of `scale_by_dion`."""

    mu: Arrays
    """Momentum, in the shapes of the parameters: the gradients, less what updates have taken from them."""
    bases: dict[str, jax.Array]
    """float32 [L, I, R] by parameter: directions of inputs, from which the next power iteration starts."""


def scale_by_dion(
    params: Params, *, momentum: float, rank_fraction: float, epsilon: float
) -> optax.GradientTransformation:
    """Replaces the gradient of each matrix by an update of low rank with nearly orthonormal directions.

    Algorithm 1 of Ahn et al. 2025 (arXiv 2504.05295) for W = X^T, because x @ W is computed here. With M the momentum
    and Q the basis of inputs:

        B = M + G
        P = orthonormal columns that span B^T Q        one power iteration, from the Q of the previous step
        Z = B P
        M = B - (1 - momentum) Z P^T                   error feedback: what the update leaves out stays in full
        Q = the columns of Z, each over its norm
        update = sqrt(O / I) Q P^T

    The first Q is random. Its seed is the name of the parameter, not the seed of the run, because the iteration soon
    forgets it.
    """
    matrices = {name: param for name, param in params.items() if is_matrix(param)}

    def init(like: Arrays) -> DionState:
        bases = {name: _first_basis(param, _rank(param, rank_fraction)) for name, param in matrices.items()}
        return DionState(optax.tree.zeros_like(like), bases)

    def update(grads: Arrays, state: DionState, _: Arrays | None = None) -> tuple[Arrays, DionState]:
        updates, mu, bases = dict(grads), dict(state.mu), {}
        for name, param in matrices.items():
            sum_LIO = param.to_matrices(state.mu[name]).astype(jnp.float32) + param.to_matrices(grads[name])
            product_LOR = jnp.einsum("lio,lir->lor", sum_LIO, state.bases[name], precision="highest")
            outputs_LOR = orthonormal_columns(product_LOR)
            inputs_LIR = jnp.einsum("lio,lor->lir", sum_LIO, outputs_LOR, precision="highest")
            applied_LIO = jnp.einsum("lir,lor->lio", inputs_LIR, outputs_LOR, precision="highest")
            mu[name] = param.from_matrices(sum_LIO - (1 - momentum) * applied_LIO).astype(state.mu[name].dtype)
            norms_L1R = jnp.sqrt(jnp.sum(jnp.square(inputs_LIR), axis=1, keepdims=True))
            bases[name] = inputs_LIR / (norms_L1R + epsilon)
            direction_LIO = jnp.einsum("lir,lor->lio", bases[name], outputs_LOR, precision="highest")
            inputs, outputs = param.matrix_shape[1:]
            updates[name] = param.from_matrices(math.sqrt(outputs / inputs) * direction_LIO).astype(grads[name].dtype)
        return updates, DionState(mu, bases)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _rank(param: Param, fraction: float) -> int:
    _, inputs, outputs = param.matrix_shape
    return math.ceil(fraction * min(inputs, outputs))


def _first_basis(param: Param, rank: int) -> jax.Array:
    count, inputs, _ = param.matrix_shape
    key = jax.random.key(zlib.crc32(param.name.encode()), impl="threefry2x32")
    return jax.random.normal(key, (count, inputs, rank))
