"""Straightforward optax programs of Muon, SOAP and Kron, which `benchmarks.optimizer_programs` measures ours against.

Their weights are stacks of matrices, [layers, inputs, outputs], and vectors; no matrix is split into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import solve_triangular
from optax.contrib import MuonDimensionNumbers

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim import Param

Arrays: TypeAlias = dict[str, jax.Array]
Sides: TypeAlias = "tuple[jax.Array | None, ...]"
"""An array for the inputs of a matrix and one for its outputs; None for a side that is too large."""
RATE, WEIGHT_DECAY = 1e-3, 0.1
TINY = float(jnp.finfo(jnp.float32).tiny)


def plain_muon(params: Mapping[str, Param]) -> optax.GradientTransformation:
    """Returns `optax.contrib.muon`, with Adam for all parameters that are not matrices of hidden layers."""
    numbers = {n: MuonDimensionNumbers(1, 2) if param.role == "matrix" else None for n, param in params.items()}
    return optax.contrib.muon(
        RATE,
        weight_decay=WEIGHT_DECAY,
        adam_weight_decay=WEIGHT_DECAY,
        muon_weight_dimension_numbers=numbers,  # pyright: ignore[reportArgumentType]
    )


def plain_soap(params: Mapping[str, Param]) -> optax.GradientTransformation:
    """Returns SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3), with Adam for vectors."""
    soap = _by_matrix(_soap_state, _soap_update, SoapMatrix)
    return _with_decay(soap, optax.scale_by_adam(0.95, 0.95), params)


def plain_kron(params: Mapping[str, Param]) -> optax.GradientTransformation:
    """Returns PSGD Kron (Li 2024, arXiv 2402.11858) with triangular factors, which vectors do without."""
    kron = optax.chain(_by_matrix(_kron_state, _kron_update, KronMatrix), _clip_rms(1.1))
    return _with_decay(kron, optax.scale_by_adam(0.9, 0.999), params)


def _with_decay(
    matrices: optax.GradientTransformation, vectors: optax.GradientTransformation, params: Mapping[str, Param]
) -> optax.GradientTransformation:
    rules: dict[Hashable, optax.GradientTransformation] = {"matrices": matrices, "vectors": vectors}
    labels = {name: "vectors" if param.role == "vector" else "matrices" for name, param in params.items()}
    decay = optax.add_decayed_weights(WEIGHT_DECAY)
    return optax.chain(optax.partition(rules, labels), decay, optax.scale_by_learning_rate(RATE))


def _by_matrix(
    init: Callable[[jax.Array], Any], update: Callable[..., tuple[Arrays, PyTree]], kind: type
) -> optax.GradientTransformation:
    """Returns a rule whose state is a count and an `init` of every matrix of every stack.

    Args:
        update: takes the gradients, the state of all matrices, the count of updates before this one, and two functions
            that apply another one to every matrix: `together` and `in_turn`.
        kind: class of the state of a matrix.
    """

    def together(function: Callable[..., Any], *trees: PyTree) -> PyTree:
        return jax.tree.map(jax.vmap(function), *trees, is_leaf=lambda node: isinstance(node, kind))

    def in_turn(function: Callable[..., Any], *trees: PyTree) -> PyTree:
        # For factorizations and triangular solves, since JAX 0.10 can wait forever in one of several matrices on a CPU.
        def map_stack(*stacks: PyTree) -> PyTree:
            return jax.lax.map(lambda matrices: function(*matrices), stacks)

        return jax.tree.map(map_stack, *trees, is_leaf=lambda node: isinstance(node, kind))

    def update_all(grads: Arrays, state: dict[str, Any], _: Arrays | None = None) -> tuple[Arrays, dict[str, Any]]:
        updates, matrices = update(grads, state["matrices"], state["count"], together, in_turn)
        return updates, {"count": state["count"] + 1, "matrices": matrices}

    return optax.GradientTransformation(
        lambda params: {"count": jnp.zeros((), jnp.int32), "matrices": jax.tree.map(jax.vmap(init), params)},
        update_all,  # pyright: ignore[reportArgumentType]
    )


def _clip_rms(highest: float) -> optax.GradientTransformation:
    """Scales a weight's update of a larger root mean square down to `highest`, each layer by itself."""

    def clip(u: jax.Array) -> jax.Array:
        return u * jnp.minimum(1, highest / (jnp.sqrt(jnp.mean(u**2, axis=(1, 2), keepdims=True)) + TINY))

    return optax.stateless(lambda updates, _: jax.tree.map(clip, updates))


BETA, FREQUENCY, LARGEST = 0.95, 10, 10000


class SoapMatrix(NamedTuple):
    """State of SOAP for one matrix. A side of more than `LARGEST` has no average and no basis."""

    mu: jax.Array
    nu: jax.Array
    grams: Sides
    bases: Sides


def _soap_state(matrix: jax.Array) -> SoapMatrix:
    grams = tuple(jnp.zeros((size, size)) if size <= LARGEST else None for size in matrix.shape)
    bases = tuple(jnp.eye(size) if size <= LARGEST else None for size in matrix.shape)
    return SoapMatrix(jnp.zeros_like(matrix), jnp.zeros_like(matrix), grams, bases)


def _soap_update(
    grads: Arrays, matrices: PyTree, count: jax.Array, together: Callable[..., PyTree], in_turn: Callable[..., PyTree]
) -> tuple[Arrays, PyTree]:
    def first(grads: Arrays, matrices: PyTree) -> tuple[Arrays, PyTree]:
        return optax.tree.zeros_like(grads), in_turn(_eigenbases, together(_add_product, grads, matrices))

    def later(grads: Arrays, matrices: PyTree) -> tuple[Arrays, PyTree]:
        matrices = together(_add_gradient, grads, matrices)
        updates = together(lambda g, matrix: _adam_step(matrix, count), grads, matrices)
        matrices = together(_add_product, grads, matrices)
        due = count % FREQUENCY == 0
        return updates, jax.lax.cond(due, lambda old: in_turn(_renew, old), lambda old: old, matrices)

    return jax.lax.cond(count == 0, first, later, grads, matrices)


def _rotate(x: jax.Array, bases: Sides) -> jax.Array:
    left, right = bases
    x = x if left is None else left.T @ x
    return x if right is None else x @ right


def _add_gradient(g: jax.Array, matrix: SoapMatrix) -> SoapMatrix:
    nu = BETA * matrix.nu + (1 - BETA) * _rotate(g, matrix.bases) ** 2
    return matrix._replace(mu=BETA * matrix.mu + (1 - BETA) * g, nu=nu)


def _adam_step(matrix: SoapMatrix, count: jax.Array) -> jax.Array:
    correction = 1 - BETA**count
    step = _rotate(matrix.mu / correction, matrix.bases) / (jnp.sqrt(matrix.nu / correction) + 1e-8)
    return _rotate(step, tuple(None if basis is None else basis.T for basis in matrix.bases))


def _add_product(g: jax.Array, matrix: SoapMatrix) -> SoapMatrix:
    products = (lambda: g @ g.T, lambda: g.T @ g)
    grams = tuple(
        None if gram is None else BETA * gram + (1 - BETA) * product()
        for gram, product in zip(matrix.grams, products, strict=True)
    )
    return matrix._replace(grams=grams)


def _eigenbases(matrix: SoapMatrix) -> SoapMatrix:
    bases = tuple(None if gram is None else jnp.linalg.eigh(gram)[1][:, ::-1] for gram in matrix.grams)
    return matrix._replace(bases=bases)


def _renew(matrix: SoapMatrix) -> SoapMatrix:
    """Takes a step of the power iteration with QR (algorithm 4); `nu` follows the order of the eigenvectors."""
    bases, nu = [], matrix.nu
    for axis, (gram, basis) in enumerate(zip(matrix.grams, matrix.bases, strict=True)):
        if gram is None or basis is None:
            bases.append(None)
            continue
        product = gram @ basis
        order = jnp.argsort(-jnp.sum(basis * product, axis=0))
        bases.append(jnp.linalg.qr(product[:, order])[0])
        nu = jnp.take(nu, order, axis=axis)
    return matrix._replace(bases=tuple(bases), nu=nu)


MOMENTUM, FACTOR_RATE, LARGEST_TRIANGLE = 0.9, 0.1, 25000


class KronMatrix(NamedTuple):
    """State of Kron for one matrix. The factor of a side of more than `LARGEST_TRIANGLE` is a diagonal."""

    mu: jax.Array
    left: jax.Array
    right: jax.Array


def _kron_state(matrix: jax.Array) -> KronMatrix:
    left, right = (jnp.eye(size) if size <= LARGEST_TRIANGLE else jnp.ones(size) for size in matrix.shape)
    return KronMatrix(jnp.zeros_like(matrix), left, right)


def _kron_update(
    grads: Arrays, matrices: PyTree, count: jax.Array, together: Callable[..., PyTree], in_turn: Callable[..., PyTree]
) -> tuple[Arrays, PyTree]:
    """Renews the factors in every update, as Kron does in its first 500."""

    def average(g: jax.Array, matrix: KronMatrix) -> KronMatrix:
        return matrix._replace(mu=MOMENTUM * matrix.mu + (1 - MOMENTUM) * g)

    def whiten(g: jax.Array, matrix: KronMatrix) -> jax.Array:
        half = _times(matrix.left, matrix.mu / (1 - MOMENTUM ** (count + 1)))
        whitened = _times(matrix.right, _times(_transposed(matrix.left), half).T)
        return _times(_transposed(matrix.right), whitened).T

    matrices = together(average, grads, matrices)
    matrices = in_turn(lambda g, matrix: _fit_factors(matrix, count), grads, matrices)
    return together(whiten, grads, matrices), matrices


def _times(factor: jax.Array, x: jax.Array) -> jax.Array:
    return factor[:, None] * x if factor.ndim == 1 else factor @ x


def _transposed(factor: jax.Array) -> jax.Array:
    return factor if factor.ndim == 1 else factor.T


def _solve(factor: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the inverse of the transposed factor, times x."""
    return x / factor[:, None] if factor.ndim == 1 else solve_triangular(factor, x, trans=1)


def _fit_factors(matrix: KronMatrix, count: jax.Array) -> KronMatrix:
    momentum = matrix.mu / (1 - MOMENTUM ** (count + 1))
    v = jax.random.normal(jax.random.fold_in(jax.random.key(42), count), momentum.shape)
    g = momentum + jnp.sqrt(jnp.finfo(jnp.float32).eps) * jnp.mean(jnp.abs(momentum)) * v
    a = _times(matrix.right, _times(matrix.left, g).T).T
    b = _solve(matrix.right, _solve(matrix.left, v).T).T
    left, right = _fit_factor(matrix.left, a, b), _fit_factor(matrix.right, a.T, b.T)
    ratio = jnp.sqrt(jnp.max(jnp.abs(right)) / jnp.max(jnp.abs(left)))
    return matrix._replace(left=left * ratio, right=right / ratio)


def _fit_factor(factor: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    if factor.ndim == 1:
        aa, bb = jnp.sum(a * a, axis=1), jnp.sum(b * b, axis=1)
        return factor - FACTOR_RATE / (jnp.max(aa + bb) + TINY) * (aa - bb) * factor
    aa, bb = a @ a.T, b @ b.T
    return factor - FACTOR_RATE / (_norm_bound(aa + bb) + TINY) * jnp.triu(aa - bb) @ factor


def _norm_bound(x: jax.Array) -> jax.Array:
    """Returns a lower bound of the spectral norm of a symmetric matrix, from its largest column."""
    column = x[:, jnp.argmax(jnp.sum(x * x, axis=0))]
    image = column @ x
    return jnp.linalg.norm(image / (jnp.linalg.norm(image) + TINY) @ x)
