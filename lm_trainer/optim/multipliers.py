"""Learning rate, epsilon and initial values of each parameter of a model, relative to a smaller model."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import optax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.optimizer import Curvature
from lm_trainer.optim.params import Arrays, Multipliers, Param, Params


class Ratios(NamedTuple):
    """Sizes of a parameter over its sizes in the base."""

    inputs: float
    """Ratio of the numbers of inputs; 1 for tables, which have one row for each input."""
    outputs: float
    """Ratio of the numbers of outputs; the ratio of the numbers of elements of a vector."""

    @classmethod
    def of(cls, param: Param, base: Param) -> Ratios:
        """Returns the ratios of a parameter and of the parameter of the same name in the base."""
        (inputs, outputs), (base_inputs, base_outputs) = _fans(param), _fans(base)
        return cls(inputs / base_inputs, outputs / base_outputs)


def _fans(param: Param) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs."""
    match param.role:
        case "matrix":
            return param.matrix_shape[1:]
        case "head":
            return param.shape[param.axes.index("embed")], 1
        case "embedding":
            return 1, param.shape[param.axes.index("embed")]
        case "vector":
            return 1, math.prod(param.shape[param.lead :])


def initial_multiplier(param: Param, base: Param) -> float:
    """Returns the factor of the initial standard deviation.

    Weights with I inputs and O outputs have a spectral norm proportional to sqrt(O / I) if their standard deviation is
    proportional to min(1, sqrt(O / I)) / sqrt(I) (Yang et al. 2023, arXiv 2310.17813, section 3). Vectors and tables
    keep their initial values.
    """
    ratio = Ratios.of(param, base)
    if param.role not in ("matrix", "head"):
        return 1.0
    return min(1.0, math.sqrt(ratio.outputs / ratio.inputs)) / math.sqrt(ratio.inputs)


def find_multipliers(
    param: Param, base: Param, optimizer: OptimizerConfig, *, depth: float = 1.0, factor: float = 1.0
) -> Multipliers:
    """Returns the multipliers of a parameter, for the number I of its inputs and O of its outputs.

    Rates of updates whose elements have a size of about 1 are proportional to 1 / I (Yang et al. 2022, arXiv
    2203.03466, table 8). Updates with another spectral norm n(I, O) get rates proportional to sqrt(O / I) / n(I, O)
    (Yang et al. 2023, arXiv 2310.17813, section 3). Gradients, and so epsilons, are proportional to 1 / O, and in
    layers to 1 / depth (Dey et al. 2025, arXiv 2505.01618, table 1).

    Args:
        param: the parameter.
        base: the parameter of the same name in the base.
        optimizer: optimizer of the run.
        depth: ratio of the numbers of layers, if hyperparameters are transferred over depth.
        factor: factor of the forward pass that the parameter takes up. It multiplies the parameter and its updates, and
            divides its gradients.
    """
    ratio = Ratios.of(param, base)
    rate = 1.0 / ratio.inputs
    if param.role == "matrix":
        norm, base_norm = (optimizer.matrix_update_norm(*p.matrix_shape[1:]) for p in (param, base))
        if norm is not None and base_norm is not None:
            rate = math.sqrt(ratio.outputs / ratio.inputs) / (norm / base_norm)
    gradient = 1.0 / ratio.outputs / (depth if "layers" in param.axes else 1.0)
    return Multipliers(rate=rate * factor, epsilon=gradient / factor)


def with_multipliers(
    transform: optax.GradientTransformation, params: Params, curvature: Curvature | None
) -> optax.GradientTransformation:
    """Applies the multipliers of the parameters to a scale-invariant transformation.

    An epsilon of c times e has the same effect as gradients over c with an epsilon of e. Returns the transformation
    unchanged if all multipliers are 1.

    Args:
        transform: transformation from gradients to updates.
        params: parameters with their multipliers.
        curvature: estimator of the argument `curvature` of the transformation, if it has one.
    """
    scales = {name: 1.0 / p.multipliers.epsilon for name, p in params.items() if p.multipliers.epsilon != 1.0}
    rates = {name: p.multipliers.rate for name, p in params.items() if p.multipliers.rate != 1.0}
    if not scales and not rates:
        return transform
    inner = optax.with_extra_args_support(transform)
    # The Gauss-Newton estimator squares gradients; Hutchinson's is quadratic in the parameters already.
    squared = {name: scale**2 if curvature == "hutchinson" else scale for name, scale in scales.items()}

    def update(
        updates: Arrays, state: optax.OptState, weights: Arrays | None = None, /, **extra_args: PyTree
    ) -> tuple[Arrays, optax.OptState]:
        if (estimate := extra_args.get("curvature")) is not None:
            extra_args["curvature"] = _scale_some(estimate, squared)
        scaled: PyTree
        scaled, state = inner.update(_scale_some(updates, scales), state, weights, **extra_args)
        return _scale_some(scaled, rates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)  # pyright: ignore[reportArgumentType]


def _scale_some(arrays: Arrays, factors: dict[str, float]) -> dict[str, jax.Array]:
    return {name: x * factors[name] if name in factors else x for name, x in arrays.items()}
