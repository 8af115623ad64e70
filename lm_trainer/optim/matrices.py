"""Parts of optimizers that update the matrices of hidden layers by one rule and all other parameters by another.

Sizes of a matrix are (inputs, outputs), as in x @ W; `Param.matrix_shape` says which axes of an array they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState

from lm_trainer.optim.params import Param, Params

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def is_matrix(param: Param) -> bool:
    """True for a linear map of a hidden layer, and for a stack of such."""
    return param.role == "matrix"


def split_by_role(
    params: Params, matrices: optax.GradientTransformation, others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Applies `matrices` to linear maps of hidden layers, `others` to embeddings, heads, biases and scales of norms."""
    labels = {name: "matrices" if is_matrix(param) else "others" for name, param in params.items()}
    return optax.partition({"matrices": matrices, "others": others}, labels)


def orthogonalised_momentum(
    params: Params, *, momentum: float, nesterov: bool, steps: int, epsilon: float
) -> optax.GradientTransformation:
    """Replaces the momentum U S V^T of each matrix by about U V^T, by the Newton-Schulz iteration of Muon
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    `steps` times X <- a X + (b A + c A^2) X, with A = X X^T, (a, b, c) = (3.4445, -4.7750, 2.0315) and X at first the
    momentum over its Frobenius norm plus `epsilon`. That applies p(s) = a s + b s^3 + c s^5 to each singular value,
    which the norm has brought to at most 1. The coefficients do not let it converge to 1: they make the slope at 0, a,
    as large as it can be, so that after five steps every singular value above 0.003 is between 0.68 and 1.21. That
    trains as well as 1 does, for fewer steps.

    A stack (12, 768, 3072) is 12 matrices; each is iterated as (768, 768) @ (768, 3072), the smaller side first.

    The state is that of `optax.contrib.scale_by_muon`, and so are the numbers. That function iterates one matrix as a
    stack of one, for which XLA's CPU backend has a slower product (1.4 times the time at 128 x 512).
    """
    matrices = {name: param for name, param in params.items() if is_matrix(param)}

    def init(values: Any) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(values), jnp.asarray(_COEFFICIENTS))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        average = optax.tree.update_moment(updates, state.mu, momentum, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            ahead = optax.tree.bias_correction(average, momentum, optax.safe_increment(count))
            own = optax.tree.bias_correction(updates, momentum, count)
            corrected = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, own)
        else:
            corrected = optax.tree.bias_correction(average, momentum, count)

        def orthogonalised(name: str, x: Any) -> Any:
            # A parameter that is no matrix is optax.MaskedNode in the tree, and is handed through.
            if name not in matrices:
                return x
            one = partial(_newton_schulz, coefficients=state.ns_coeffs, steps=steps, epsilon=epsilon)
            stack = matrices[name].to_matrices(x)
            new = one(stack[0])[None] if len(stack) == 1 else jax.vmap(one)(stack)
            return matrices[name].from_matrices(new)

        new = {name: orthogonalised(name, x) for name, x in corrected.items()}
        return new, MuonState(count, average, state.ns_coeffs)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _newton_schulz(x: jax.Array, *, coefficients: jax.Array, steps: int, epsilon: float) -> jax.Array:
    """The iteration for one matrix."""
    flat, (a, b, c) = x.shape[0] <= x.shape[1], coefficients.astype(x.dtype)
    x = x if flat else x.T
    x /= jnp.linalg.norm(x, ord="fro") + epsilon
    for _ in range(steps):
        squared = x @ x.T
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x if flat else x.T


def scale_each(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiplies the update of each named parameter by a fixed number; others stay as they are."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return {name: u * factors[name] if name in factors else u for name, u in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def width_factors(params: Params) -> dict[str, float]:
    """sqrt(max(1, outputs / inputs)) for each matrix: the update then changes its outputs by as much at every width
    (Bernstein and Newhouse 2024, arXiv 2410.21265).
    """
    shapes = {name: param.matrix_shape for name, param in params.items() if is_matrix(param)}
    return {name: math.sqrt(max(1.0, outputs / inputs)) for name, (_, inputs, outputs) in shapes.items()}


def rms_factors(params: Params, rms: float) -> dict[str, float]:
    """`rms` * sqrt(max(inputs, outputs)) for each matrix, which gives an orthogonal update the root mean square `rms`:
    its min(inputs, outputs) singular values of 1 are spread over inputs * outputs numbers.
    """
    shapes = {name: param.matrix_shape for name, param in params.items() if is_matrix(param)}
    return {name: rms * math.sqrt(max(inputs, outputs)) for name, (_, inputs, outputs) in shapes.items()}


def other_rate(params: Params, ratio: float) -> optax.GradientTransformation:
    """Multiplies the updates of all but the matrices by `ratio`, which gives them a learning rate of their own."""
    return scale_each({name: ratio for name, param in params.items() if not is_matrix(param)})
