"""Building blocks of optimizers that use one rule for the matrices of hidden layers and another for all other
parameters.

Matrix sizes are (inputs, outputs), as in x @ W; `Param.matrix_shape` determines the axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import optax
from optax.contrib import MuonDimensionNumbers

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.params import Arrays, Param, Params

ADAM_RMS = 0.2
"""About the root mean square of AdamW's updates in training, so learning rates for AdamW suit updates of this size (Liu
et al. 2025, arXiv 2502.16982)."""


def is_matrix(param: Param) -> bool:
    """Returns true for a linear map of a hidden layer or a stack of such maps."""
    return param.role == "matrix"


def split_by_role(
    params: Params, matrices: optax.GradientTransformation, remaining: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Applies `matrices` to linear maps of hidden layers, `remaining` to embeddings, heads, biases and norm scales."""
    labels = {name: "matrices" if is_matrix(param) else "others" for name, param in params.items()}
    return optax.partition({"matrices": matrices, "others": remaining}, labels)


def orthogonalise_momentum(
    params: Params, *, momentum: float, nesterov: bool, steps: int, epsilon: float
) -> optax.GradientTransformation:
    """Replaces the momentum U S V^T of each matrix by approximately U V^T, with Muon's Newton-Schulz iteration.

    See Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    Iterates X <- a X + (b A + c A^2) X `steps` times, with A = X X^T and (a, b, c) = (3.4445, -4.7750, 2.0315). X
    starts as the momentum over the sum of its Frobenius norm and `epsilon`. Each iteration applies p(s) = a s + b s^3 +
    c s^5 to each singular value, which the norm has scaled to at most 1. The coefficients do not make the iteration
    converge to 1: they maximise the slope at 0, a, so that after five steps every singular value that started above
    0.003 is between 0.68 and 1.21. That trains equally well and takes fewer steps.

    A stack (12, 768, 3072) is 12 matrices; each is iterated as (768, 768) @ (768, 3072), with the smaller side first.
    """
    numbers = {name: _dimension_numbers(param) for name, param in params.items() if is_matrix(param)}

    def dimension_numbers(updates: PyTree) -> dict[str, PyTree]:
        # A parameter that is not a matrix is an optax.MaskedNode in the tree, and is passed through.
        return {name: numbers.get(name, updates[name]) for name in updates}

    return optax.contrib.scale_by_muon(
        ns_steps=steps, beta=momentum, eps=epsilon, nesterov=nesterov, weight_dimension_numbers=dimension_numbers
    )


def _dimension_numbers(param: Param) -> MuonDimensionNumbers:
    """Returns the axes of the inputs and of the outputs of one matrix, in optax's format."""
    inputs, outputs = param.matrix_shape[1:]
    # The inputs are the first axes after the leading ones, as many as multiply to the number of inputs. Both products
    # are compared, because an axis of size 1 may belong to either side.
    axes, size, split = range(param.lead, len(param.shape)), 1, param.lead
    while size != inputs or math.prod(param.shape[split:]) != outputs:
        size, split = size * param.shape[split], split + 1
    return MuonDimensionNumbers(tuple(a for a in axes if a < split), tuple(a for a in axes if a >= split))


def scale_each(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiplies the update of each named parameter by a fixed number; other updates are not changed."""

    def update(updates: Arrays, state: optax.OptState, params: Arrays | None = None) -> tuple[Arrays, optax.OptState]:
        del params
        return {name: u * factors[name] if name in factors else u for name, u in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def width_factors(params: Params) -> dict[str, float]:
    """Returns sqrt(max(1, outputs / inputs)) for each matrix.

    With this factor, updates change the outputs equally at every width (Bernstein and Newhouse 2024, arXiv 2410.21265).
    """
    shapes = {name: param.matrix_shape for name, param in params.items() if is_matrix(param)}
    return {name: math.sqrt(max(1.0, outputs / inputs)) for name, (_, inputs, outputs) in shapes.items()}


def rms_factors(params: Params, rms: float) -> dict[str, float]:
    """Returns, for each matrix, the factor that gives an orthogonal update the root mean square `rms`.

    It is `rms` * sqrt(max(inputs, outputs)), because the min(inputs, outputs) singular values of 1 are distributed over
    inputs * outputs elements.
    """
    shapes = {name: param.matrix_shape for name, param in params.items() if is_matrix(param)}
    return {name: rms * math.sqrt(max(inputs, outputs)) for name, (_, inputs, outputs) in shapes.items()}


def scale_non_matrices(params: Params, ratio: float) -> optax.GradientTransformation:
    """Multiplies the updates of all parameters except matrices by `ratio`, which gives them another learning rate."""
    return scale_each({name: ratio for name, param in params.items() if not is_matrix(param)})
