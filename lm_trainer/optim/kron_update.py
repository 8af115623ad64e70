"""PSGD with Kronecker factors: the gradient is whitened by a preconditioner that is learned during training.

The preconditioner of a block G is P = Q^T Q with Q = Q_in (x) Q_out, so that P G = Q_in^T Q_in G Q_out^T Q_out. Both
factors are upper triangles, or diagonals if a dimension is too large. They are updated by gradient descent on E[tr(P G
G^T + P^-1 V V^T)], where V are random normal numbers. This is minimal if the elements of P G are uncorrelated and have
variance 1 (Li 2024).

Shape letters: K blocks of one parameter, I inputs of a block, O outputs of a block, N either of them. A factor `q` is
q_KNN or, if diagonal, q_KN. With the default settings, linear maps from 768 to 3072 in 12 layers have

    gradient     (12, 768, 3072)
    g_KIO        (432, 256, 256)   12 layers of 3 x 12 blocks
    q_in, q_out  (432, 256, 256)   one pair for each block
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm_trainer.optim.blocks import Blocks
from lm_trainer.optim.clip import clip_update_rms
from lm_trainer.optim.factorizations import solve_upper_transposed
from lm_trainer.optim.kron import KronConfig
from lm_trainer.optim.params import Arrays, Param, Params

_HIGHEST_RMS = 1.1
"""A whitened momentum has a root mean square of at most about 1; only an outdated factor leads to more than this
limit."""
_SEED = 42
"""A fixed seed, not the seed of the run, because the random numbers only probe the factors."""


class KronState(NamedTuple):
    """State of Kron; the factors are dicts by parameter name."""

    count: jax.Array
    """int32 []; number of steps so far, which determines the random numbers."""
    since_update: jax.Array
    """int32 []; number of steps since the last update of the factors."""
    mu: Arrays
    """Average of gradients, in the shapes of the parameters."""
    inputs: dict[str, jax.Array]
    """float32; factors of the inputs: upper triangles [K, I, I] or diagonals [K, I]."""
    outputs: dict[str, jax.Array]
    """Factors of the outputs, [K, O, O] or [K, O]; vectors have no such factor."""


def scale_by_kron(config: KronConfig, params: Params) -> optax.GradientTransformation:
    """Returns the preconditioned momentum, with a root mean square of at most 1.1 for each weight."""
    triangles = {name: _triangular_sides(config, param) for name, param in params.items()}
    max_size = config.block_size if config.partition_grads_into_blocks else None
    # Blocks are useless for a diagonal factor, which has as many elements as the dimension anyway.
    blocks = {
        n: Blocks.for_param(p, max_size, inputs=triangles[n][0], outputs=triangles[n][1]) for n, p in params.items()
    }
    normalize = _normalize(params) if config.normalize_grads else optax.identity()

    def initial_factors(side: int) -> dict[str, jax.Array]:
        by_name = {}
        for name, block in blocks.items():
            if params[name].role == "vector" and side == 1:
                continue
            size = (block.inputs, block.outputs)[side][1]
            # If two factors are multiplied, each starts from the square root of the scale, so that Q starts from the
            # scale itself.
            scale = config.preconditioner_init_scale ** (1.0 if params[name].role == "vector" else 0.5)
            one = jnp.eye(size) if triangles[name][side] else jnp.ones(size)
            by_name[name] = jnp.tile(scale * one, (block.count,) + (1,) * one.ndim)
        return by_name

    def init(like: Arrays) -> KronState:
        zero = jnp.zeros((), jnp.int32)
        return KronState(zero, zero, optax.tree.zeros_like(like), initial_factors(0), initial_factors(1))

    def update(grads: Arrays, state: KronState, _: Arrays | None = None) -> tuple[Arrays, KronState]:
        count, since = state.count + 1, state.since_update + 1
        mu = optax.tree.update_moment(grads, state.mu, config.beta1, 1)
        momentum = optax.tree.bias_correction(mu, config.beta1, count)
        split = {name: blocks[name].split(m) for name, m in momentum.items()}
        # Decided by a count, not by a random draw, because this distributes the work as evenly as possible.
        due = since >= 1 / _update_frequency(config, count)
        # A branch, not a select, so that the solves and products below are not computed between updates.
        inputs, outputs = jax.lax.cond(
            due,
            functools.partial(_update_factors, config),
            lambda _, __, *factors: factors,
            split,
            count,
            state.inputs,
            state.outputs,
        )
        whitened = {n: _precondition(inputs.get(n), outputs.get(n), m_KIO) for n, m_KIO in split.items()}
        updates = {n: blocks[n].join(u_KIO.astype(grads[n].dtype)) for n, u_KIO in whitened.items()}
        return updates, KronState(count, jnp.where(due, 0, since), mu, inputs, outputs)

    rule = optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
    return optax.chain(normalize, rule, clip_update_rms(_HIGHEST_RMS, params))


def _update_frequency(config: KronConfig, count: jax.Array) -> jax.Array:
    falling = jnp.exp(-0.001 * (count - config.update_prob_flat_start))
    return jnp.clip(falling, config.preconditioner_update_probability, 1.0)


def _triangular_sides(config: KronConfig, param: Param) -> tuple[bool, bool]:
    """Returns, for inputs and outputs, true if their factor is triangular."""
    if param.role == "vector" or config.memory_save_mode == "all_diag":
        return False, False
    _, inputs, outputs = param.matrix_shape
    fits = (1 < inputs <= config.max_size_triangular, 1 < outputs <= config.max_size_triangular)
    if config.memory_save_mode == "one_diag":
        return fits[0] and inputs < outputs, fits[1] and inputs >= outputs
    return fits


def _update_factors(
    config: KronConfig,
    momentum: dict[str, jax.Array],
    count: jax.Array,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Updates the factors by one step towards a preconditioner that whitens the momentum."""
    key = jax.random.fold_in(jax.random.key(_SEED), count)
    new_inputs, new_outputs = {}, {}
    # Sorted, because the key of each parameter depends on its index, and a restored state may have another order.
    for i, (name, m_KIO) in enumerate(sorted(momentum.items())):
        m_KIO = m_KIO.astype(inputs[name].dtype)
        v_KIO = jax.random.normal(jax.random.fold_in(key, i), m_KIO.shape, m_KIO.dtype)
        # Adds noise of relative size 3e-4, because for a momentum of low rank P would grow without bound in the other
        # directions.
        damping_K11 = jnp.sqrt(jnp.finfo(jnp.float32).eps) * jnp.mean(jnp.abs(m_KIO), axis=(1, 2), keepdims=True)
        g_KIO = m_KIO + damping_K11 * v_KIO
        q_in, q_out = _step_factors(inputs[name], outputs.get(name), g_KIO, v_KIO, config.preconditioner_lr)
        new_inputs[name] = q_in
        if q_out is not None:
            new_outputs[name] = q_out
    return new_inputs, new_outputs


def _normalize(params: Params) -> optax.GradientTransformation:
    """Divides the gradient of each weight, and of each layer of a stack, by its norm."""

    def update(updates: Arrays, state: optax.OptState, _: Arrays | None = None) -> tuple[Arrays, optax.OptState]:
        def normalize_update(name: str, g: jax.Array) -> jax.Array:
            axes = tuple(range(params[name].lead, g.ndim))
            return g / (jnp.sqrt(jnp.sum(jnp.square(g), axis=axes, keepdims=True)) + 1e-12)

        return {name: normalize_update(name, g) for name, g in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


# All products below have precision="highest": by default an accelerator rounds the operands to bfloat16 or TF32, and
# the inverse of a factor would magnify that error by its condition number.


def _multiply_factor(q: jax.Array | None, x_KIO: jax.Array) -> jax.Array:
    """Returns Q X for a factor Q of the inputs, [K, I, O]; None means the identity."""
    if q is None:
        return x_KIO
    return q[..., None] * x_KIO if q.ndim == 2 else jnp.matmul(q, x_KIO, precision="highest")


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _precondition(q_in: jax.Array | None, q_out: jax.Array | None, g_KIO: jax.Array) -> jax.Array:
    """Returns Q_in^T Q_in G Q_out^T Q_out, [K, I, O]."""
    # Each round multiplies from the left and transposes, so that two rounds restore the order of inputs and outputs.
    for q in (q_in, q_out):
        half = _multiply_factor(q, g_KIO)
        back = q if q is None or q.ndim == 2 else _transpose(q)
        g_KIO = _transpose(_multiply_factor(back, half))
    return g_KIO


def _solve_transposed(q: jax.Array | None, x_KIO: jax.Array) -> jax.Array:
    """Returns Q^-T X for a factor Q of the inputs, [K, I, O]."""
    if q is None:
        return x_KIO
    if q.ndim == 2:
        return x_KIO / q[..., None]
    return solve_upper_transposed(q, x_KIO)


def _step_factors(
    q_in: jax.Array, q_out: jax.Array | None, g_KIO: jax.Array, v_KIO: jax.Array, rate: float
) -> tuple[jax.Array, jax.Array | None]:
    """Takes a step on E[tr(P G G^T + P^-1 V V^T)] for both factors, within their group (Li 2018, arXiv 1809.10232)."""
    a_KIO = _transpose(_multiply_factor(q_out, _transpose(_multiply_factor(q_in, g_KIO))))
    b_KIO = _transpose(_solve_transposed(q_out, _transpose(_solve_transposed(q_in, v_KIO))))
    new_in = _step_factor(q_in, a_KIO, b_KIO, rate)
    if q_out is None:
        return new_in, None
    new_out = _step_factor(q_out, _transpose(a_KIO), _transpose(b_KIO), rate)
    # Only the product of the factors matters: balancing their sizes prevents both from overflowing.
    sizes = [jnp.max(jnp.abs(q), axis=tuple(range(1, q.ndim)), keepdims=True) for q in (new_in, new_out)]
    ratio_K = jnp.sqrt(sizes[1].reshape(-1) / sizes[0].reshape(-1))
    return new_in * ratio_K.reshape(sizes[0].shape), new_out / ratio_K.reshape(sizes[1].shape)


def _step_factor(q: jax.Array, a_KNM: jax.Array, b_KNM: jax.Array, rate: float) -> jax.Array:
    """Returns Q - rate / |A A^T + B B^T| * triu(A A^T - B B^T) Q.

    For the factor of the inputs, A = Q_in G Q_out^T and B = Q_in^-T V Q_out^-1; for the factor of the outputs, the
    transposes of these. N is the side of this factor, M the other side.

    The step multiplies Q by an upper triangle. The norm keeps its diagonal positive, so Q always has an inverse.
    """
    tiny = jnp.finfo(q.dtype).tiny  # a block without a gradient has a norm of 0
    if q.ndim == 2:
        aa_KN, bb_KN = jnp.sum(a_KNM * a_KNM, axis=-1), jnp.sum(b_KNM * b_KNM, axis=-1)
        size_K1 = jnp.max(jnp.abs(aa_KN + bb_KN), axis=-1, keepdims=True) + tiny
        return q - rate / size_K1 * (aa_KN - bb_KN) * q
    aa_KNN = jnp.matmul(a_KNM, _transpose(a_KNM), precision="highest")
    bb_KNN = jnp.matmul(b_KNM, _transpose(b_KNM), precision="highest")
    size_K11 = jax.vmap(_spectral_norm)(aa_KNN + bb_KNN)[:, None, None] + tiny
    return q - rate / size_K11 * jnp.matmul(jnp.triu(aa_KNN - bb_KNN), q, precision="highest")


def _spectral_norm(x_NN: jax.Array) -> jax.Array:
    """Returns a lower bound of the norm of a symmetric matrix, []. In practice it is at most a factor of sqrt(2) too
    low.

    Uses one power iteration, starting from the column with the largest norm. An eigenvalue decomposition would cost
    more than the rest of the update, and the step needs only an approximate norm.
    """
    # Scaled by the largest absolute value, so that no square overflows or underflows.
    largest = jnp.max(jnp.abs(x_NN))
    scaled_NN = x_NN / jnp.where(largest > 0, largest, 1)
    column_N = scaled_NN[:, jnp.argmax(jnp.sum(scaled_NN * scaled_NN, axis=0))]
    image_N = jnp.matmul(column_N, scaled_NN, precision="highest")
    norm = jnp.linalg.norm(image_N)
    unit_N = image_N / jnp.where(norm > 0, norm, 1)
    return largest * jnp.linalg.norm(jnp.matmul(unit_N, scaled_NN, precision="highest"))
