"""Functions of one microbatch: the loss with its gradient, and the optimizer's estimate of curvature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.log import RESERVED
from lm_trainer.step.loss.logged import Losses, with_logged
from lm_trainer.step.state.model_def import ModelDef, Params

LossFn = Callable[[PyTree, Batch, jax.Array | None], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
"""`loss(model, batch, key) -> (sum of weighted losses, sum of weights, metrics)`, all of them float32 scalars. Metrics
are sums too, and are reported after division by the sum of weights. The key is for dropout; None disables it."""


CurvatureFn = Callable[[PyTree, Batch, jax.Array], PyTree]
"""`curvature(model, batch, key)` returns sums over the microbatch, as a nested dict with the structure of the
parameters."""


STEP_SCALARS = ("loss", "weight")
"""Names of the scalars that the sums of every loss contain."""


class Sums(NamedTuple):
    """Sums over microbatches. Adding them gives the sums over the global batch."""

    scalars: dict[str, jax.Array]
    """float32 scalars by name."""
    tree: Params
    """Arrays by parameter name."""


MicrobatchFn = Callable[[Params, Batch, jax.Array], Sums]
"""`function(params, microbatch, key) -> Sums`; each microbatch has a different key."""


def loss_of_params(
    model: ModelDef, loss: LossFn
) -> Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """Turns the loss into a function of all parameters that also returns logged values as metrics.

    The function raises as `validate_loss`.
    """

    def losses(params: Params, batch: Batch, key: jax.Array | None) -> Losses:
        return validate_loss(loss(model.merge(params), batch, key))

    return with_logged(losses)


def validate_loss(result: object) -> Losses:
    """Checks the result of a `LossFn`, and copies its metrics to a new dict.

    Raises:
        UserError: if the result has another form, or a metric has a name that is reserved for the step.
    """
    total, weight, metrics = _validate_sums(result)
    if reserved := sorted(RESERVED & metrics.keys()):
        raise UserError(f"the loss returns a metric {reserved[0]!r}, a name of the step's own; choose another")
    return total, weight, metrics


def _validate_sums(result: PyTree) -> Losses:
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping):
        if all(jnp.shape(x) == () for x in result[:2]):
            return result[0], result[1], dict(result[2])
        shapes = " and ".join(str(jnp.shape(x)) for x in result[:2])
        problem = f"the first two have the shapes {shapes}, and are to be scalars: sum them over all positions"
    else:
        problem = f"it returned {_describe_result(result)}"
    raise UserError(
        f"the loss must return (sum of the weighted losses, sum of the weights, dict of further sums, which may be "
        f"empty); {problem}"
    )


def _describe_result(result: object) -> str:
    if isinstance(result, tuple | list):
        return f"{len(result)} values, as {type(result).__name__}"
    return "one value; a mean becomes two sums" if isinstance(result, jax.Array) else type(result).__name__


def loss_and_gradient(model: ModelDef, loss: LossFn, trainable: Collection[str]) -> MicrobatchFn:
    """Returns a function that computes the sums of a loss, and the gradient of its sum for `trainable` parameters."""
    losses = loss_of_params(model, loss)

    def function(params: Params, batch: Batch, key: jax.Array) -> Sums:
        def objective(trained: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            total, weight, metrics = losses({**params, **trained}, batch, key)
            return total, {"loss": total, "weight": weight, **metrics}

        (_, scalars), grads = jax.value_and_grad(objective, has_aux=True)({name: params[name] for name in trainable})
        return Sums(scalars, grads)

    return function


def curvature_sums(model: ModelDef, curvature: CurvatureFn, trainable: Collection[str]) -> MicrobatchFn:
    """Returns a function that computes the optimizer's curvature estimate for the parameters `trainable`, as sums."""

    def function(params: Params, batch: Batch, key: jax.Array) -> Sums:
        sums = curvature(model.merge(params), batch, key)
        named = model.flatten(sums)
        return Sums({}, {name: named[name] for name in trainable})

    return function
