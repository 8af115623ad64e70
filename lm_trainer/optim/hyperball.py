"""Hyperball: matrices of hidden layers keep the norm that they start with, and move along the sphere.

Shape letters: L stacked matrices of one parameter, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.matrices import is_matrix
from lm_trainer.optim.params import Arrays, Params


class HyperballState(NamedTuple):
    """State of `keep_norms`."""

    radius: PyTree
    """By parameter: the Frobenius norm of each matrix at the start, float32 [L], or -1 before the first update;
    `optax.MaskedNode` for other parameters."""


def keep_norms(params: Params) -> optax.GradientTransformationExtraArgs:
    """Replaces the update of each matrix by a step along the sphere of its first norm (Wen et al. 2026).

    The update of arXiv 2606.16899, with R the norm of a matrix at the start, u the update of the optimizer and eta the
    learning rate:

        W <- R normalize(W - eta R normalize(u))

    Expects updates that are multiplied by the negative learning rate, of which the direction counts alone. A matrix
    that starts at zero, as in an adapter, has no sphere, and keeps its update.
    """
    matrices = {name: param for name, param in params.items() if is_matrix(param)}

    # The first update computes the norms, because there a device has whole matrices. The initial weights may be
    # sharded, and the bits of a sum over shards depend on their number.
    def unknown_radius(path: jax.tree_util.KeyPath, _: jax.Array) -> PyTree:
        (key,) = path
        assert isinstance(key, jax.tree_util.DictKey)
        return jnp.full(matrices[key.key].matrix_shape[0], -1.0) if key.key in matrices else optax.MaskedNode()

    def init(weights: Arrays) -> HyperballState:
        # Maps over the tree, as optax's functions on states expect.
        return HyperballState(jax.tree_util.tree_map_with_path(unknown_radius, weights))

    def update(
        updates: Arrays,
        state: HyperballState,
        params: Arrays | None = None,
        /,
        *,
        learning_rate: jax.Array,
        **extra_args: PyTree,
    ) -> tuple[Arrays, HyperballState]:
        del extra_args
        assert params is not None
        moved, radius = dict(updates), dict(state.radius)
        for name, param in matrices.items():
            weight_LIO = param.to_matrices(params[name]).astype(jnp.float32)
            update_LIO = param.to_matrices(updates[name]).astype(jnp.float32)
            known_L = state.radius[name]
            radius[name] = jnp.where(known_L < 0, _norms(weight_LIO), known_L)
            radius_L11 = radius[name][:, None, None]
            target_LIO = weight_LIO + learning_rate * radius_L11 * _normalize(update_LIO)
            step_LIO = radius_L11 * _normalize(target_LIO) - weight_LIO
            step_LIO = jnp.where(radius_L11 > 0, step_LIO, update_LIO)
            moved[name] = param.from_matrices(step_LIO).astype(updates[name].dtype)
        return moved, HyperballState(radius)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _norms(x_LIO: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of each matrix, float32 [L]."""
    return jnp.sqrt(jnp.sum(jnp.square(x_LIO.astype(jnp.float32)), axis=(1, 2)))


def _normalize(x_LIO: jax.Array) -> jax.Array:
    """Divides each matrix by its Frobenius norm; a matrix of zeros stays."""
    norm_L11 = _norms(x_LIO)[:, None, None]
    return x_LIO / jnp.where(norm_L11 > 0, norm_L11, 1.0)
