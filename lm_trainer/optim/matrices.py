"""What optimizers share that treat hidden matrices by one rule and all other parameters by another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers

from lm_trainer.optim.params import Param, Params


def is_matrix(param: Param) -> bool:
    """Whether a parameter is a linear map of a hidden layer (or a stack of such)."""
    return param.role == "matrix"


def split_by_role(
    params: Params, matrices: optax.GradientTransformation, others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """`matrices` for the linear maps of hidden layers, `others` for embeddings, heads, biases and scales of norms."""
    labels = {name: "matrices" if is_matrix(param) else "others" for name, param in params.items()}
    return optax.partition({"matrices": matrices, "others": others}, labels)


def orthogonalised_momentum(
    params: Params, *, momentum: float, nesterov: bool, steps: int, epsilon: float
) -> optax.GradientTransformation:
    """U V^T, near enough, of the momentum U S V^T of each matrix, by the Newton-Schulz iteration of Muon."""
    numbers = {name: _dimension_numbers(param) for name, param in params.items() if is_matrix(param)}

    def numbers_of(updates: Any) -> Any:
        # What is not a matrix stands in the tree as optax.MaskedNode.
        return {name: numbers.get(name, updates[name]) for name in updates}

    return optax.contrib.scale_by_muon(
        ns_steps=steps, beta=momentum, eps=epsilon, nesterov=nesterov, weight_dimension_numbers=numbers_of
    )


def _dimension_numbers(param: Param) -> MuonDimensionNumbers:
    """Which axes of the array are the inputs of one matrix, and which its outputs; the axes before them count them."""
    inputs, outputs = param.matrix_shape[1:]
    axes, size, split = range(param.lead, len(param.shape)), 1, param.lead
    while size != inputs or math.prod(param.shape[split:]) != outputs:
        size, split = size * param.shape[split], split + 1
    return MuonDimensionNumbers(tuple(a for a in axes if a < split), tuple(a for a in axes if a >= split))


def scale_each(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiplies the update of each named parameter by a fixed number; others stay as they are."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return {name: u * factors[name] if name in factors else u for name, u in updates.items()}, state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def width_factors(params: Params) -> dict[str, float]:
    """sqrt(max(1, outputs / inputs)) for each matrix: the update then changes the outputs alike at every width."""
    shapes = {name: param.matrix_shape for name, param in params.items() if is_matrix(param)}
    return {name: math.sqrt(max(1.0, outputs / inputs)) for name, (_, inputs, outputs) in shapes.items()}


def rms_factors(params: Params, rms: float) -> dict[str, float]:
    """`rms` * sqrt(max(inputs, outputs)) for each matrix: that is the root mean square of an orthogonal update then."""
    shapes = {name: param.matrix_shape for name, param in params.items() if is_matrix(param)}
    return {name: rms * math.sqrt(max(inputs, outputs)) for name, (_, inputs, outputs) in shapes.items()}


def other_rate(params: Params, ratio: float) -> optax.GradientTransformation:
    """Multiplies the updates of all but the matrices by `ratio`, so that their learning rate is another one."""
    return scale_each({name: ratio for name, param in params.items() if not is_matrix(param)})
