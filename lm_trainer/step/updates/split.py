"""Separation of parameters that the optimizer does not update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from lm_trainer.step.state.model_def import Params


def split_params(tree: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a tree by parameter name into the entries of all other parameters, and the entries of `names`."""
    remaining = {name: x for name, x in tree.items() if name not in names}
    return remaining, {name: tree[name] for name in tree if name in names}


class UpdateInputs(NamedTuple):
    """Inputs of an update, without parameters that the optimizer does not update."""

    params: Params
    grads: Params
    curvature: Params | None
    separated_params: Params
    separated_grads: Params
    """Gradients of the separated parameters, which are measurements."""


def split_inputs(params: Params, grads: Params, curvature: Params | None, names: Collection[str]) -> UpdateInputs:
    """Separates the parameters `names` from the inputs of an update."""
    (params, separated_params), (grads, separated_grads) = split_params(params, names), split_params(grads, names)
    curvature = None if curvature is None else split_params(curvature, names)[0]
    return UpdateInputs(params, grads, curvature, separated_params, separated_grads)
