"""Adafactor: second moments of matrices as the product of a row and a column, which take very little memory.

Shape letters: L stacked matrices of one parameter, I inputs, O outputs. For example, linear maps from 768 to 3072 in 12
layers have g_LIO (12, 768, 3072), rows_LI (12, 768) and columns_LO (12, 3072): 46 thousand numbers instead of 28
million.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.adafactor import AdafactorConfig
from lm_trainer.optim.clip import clip_update_rms
from lm_trainer.optim.params import Arrays, Params


def scale_by_adafactor(config: AdafactorConfig, params: Params) -> optax.GradientTransformation:
    """Returns the gradient over the root of its factored second moment, clipped and scaled to the weight."""
    parts: list[optax.GradientTransformation] = [_divide_by_second_moment(config, params)]
    if config.clipping_threshold is not None:
        parts.append(clip_update_rms(config.clipping_threshold, params))
    if config.multiply_by_parameter_scale:
        parts.append(_scale_to_weights(params))
    if config.beta1:
        parts.append(optax.ema(config.beta1, debias=False))
    return optax.chain(*parts)


def _divide_by_second_moment(config: AdafactorConfig, params: Params) -> optax.GradientTransformation:
    min_size = config.min_dim_size_to_factor
    factored = {
        name: param
        for name, param in params.items()
        if param.role != "vector" and min(param.matrix_shape[1:]) >= min_size
    }
    labels = {name: "factored" if name in factored else "whole" for name in params}
    return optax.partition(
        {
            "factored": _scale_by_factors(factored, config.decay_rate, config.epsilon),
            "whole": _scale_by_squares(config.decay_rate, config.epsilon),
        },
        labels,
    )


def _decay_at_step(count: jax.Array, rate: float) -> jax.Array:
    """Returns the decay at step `count`, counted from 1. The first decay is 0, so the initial 0 has no effect."""
    return 1 - count.astype(jnp.float32) ** -rate


class SquaresState(NamedTuple):
    """State for the parameters that are not factored."""

    count: jax.Array
    """int32 []; number of steps so far."""
    nu: Arrays
    """Average of squared gradients, in the shapes of the parameters."""


def _scale_by_squares(decay_rate: float, epsilon: float) -> optax.GradientTransformation:
    """Applies algorithm 5 to vectors and small matrices: a second moment for each element."""

    def init(weights: Arrays) -> SquaresState:
        return SquaresState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, weights))

    def update(updates: Arrays, state: SquaresState, _: Arrays | None = None) -> tuple[Arrays, SquaresState]:
        count = state.count + 1
        decay = _decay_at_step(count, decay_rate)
        nu = jax.tree.map(
            lambda v, g: (decay * v + (1 - decay) * (jnp.square(g) + epsilon)).astype(v.dtype), state.nu, updates
        )
        return jax.tree.map(lambda g, v: g * jax.lax.rsqrt(v), updates, nu), SquaresState(count, nu)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


class FactorState(NamedTuple):
    """State for the factored parameters."""

    count: jax.Array
    """int32 []; number of steps so far."""
    rows: dict[str, jax.Array]
    """float32 [L, I]: the mean of the squared gradient over the outputs."""
    columns: dict[str, jax.Array]
    """float32 [L, O]: the mean of the squared gradient over the inputs."""


def _scale_by_factors(params: Params, decay_rate: float, epsilon: float) -> optax.GradientTransformation:
    """Applies algorithm 4, with means instead of sums.

    `optax.scale_by_factored_rms` is not used: it factors the two largest dimensions of an array, which are not the
    dimensions of one matrix if layers with heads are stacked, and it computes in the dtype of the gradient.
    """
    shapes = {name: param.matrix_shape for name, param in params.items()}

    def init(_: Arrays) -> FactorState:
        return FactorState(
            jnp.zeros((), jnp.int32),
            {name: jnp.zeros((n, rows), jnp.float32) for name, (n, rows, _) in shapes.items()},
            {name: jnp.zeros((n, columns), jnp.float32) for name, (n, _, columns) in shapes.items()},
        )

    def update(updates: Arrays, state: FactorState, _: Arrays | None = None) -> tuple[Arrays, FactorState]:
        count = state.count + 1
        decay = _decay_at_step(count, decay_rate)
        rows, columns, scaled = {}, {}, dict(updates)
        for name, param in params.items():
            g_LIO = param.to_matrices(updates[name]).astype(jnp.float32)
            squares_LIO = jnp.square(g_LIO) + epsilon
            rows[name] = decay * state.rows[name] + (1 - decay) * jnp.mean(squares_LIO, axis=2)
            columns[name] = decay * state.columns[name] + (1 - decay) * jnp.mean(squares_LIO, axis=1)
            # The product is divided by the mean of the rows here, because as a separate factor the mean could leave the
            # range of float32.
            shares_LI = rows[name] / jnp.mean(rows[name], axis=1, keepdims=True)
            scaled_LIO = g_LIO * jax.lax.rsqrt(shares_LI)[:, :, None] * jax.lax.rsqrt(columns[name])[:, None, :]
            scaled[name] = param.from_matrices(scaled_LIO).astype(updates[name].dtype)
        return scaled, FactorState(count, rows, columns)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _scale_to_weights(params: Params) -> optax.GradientTransformation:
    """Multiplies by max(1e-3, root mean square of the weight), separately for each layer of a stack (algorithm 4,
    alpha).

    The minimum of 1e-3 lets a weight that starts at 0 grow.
    """

    def update(updates: Arrays, state: optax.OptState, weights: PyTree = None) -> tuple[Arrays, optax.OptState]:
        def scale_update(name: str, u: jax.Array) -> jax.Array:
            axes = tuple(range(params[name].lead, u.ndim))
            squares = jnp.square(weights[name].astype(jnp.float32))
            rms = jnp.sqrt(jnp.mean(squares, axis=axes, keepdims=True))
            return u * jnp.maximum(rms, 1e-3).astype(u.dtype)

        return {name: scale_update(name, u) for name, u in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
