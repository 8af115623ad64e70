"""The sharding of everything that training holds: parameters and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.mesh import spec_axes
from lm_trainer.parallel.sharding import ParamSharding

_STACK_DIMS = 3
_BLOCK_EXPONENTS = jax.tree_util.GetAttrKey("block_exponents")
"""The end of the path of such an array: see `lm_trainer.core.block_float`."""


class TrainedShardings(NamedTuple):
    """The sharding of every array of a `TrainState` in storage."""

    params: dict[str, NamedSharding]
    opt_state: Any


@dataclass(frozen=True)
class StateSharding:
    """Shardings of everything that a step reads and writes."""

    mesh: Mesh
    params: Mapping[str, ParamSharding]
    """By parameter name."""
    trained: TrainedShardings
    """Shardings of what is trained."""
    storage: Mapping[str, NamedSharding]
    """Shardings of every parameter in storage, whether it is trained or not."""


def plan_state_sharding(
    trainable: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    param_shardings: Mapping[str, ParamSharding],
    mesh: Mesh,
) -> StateSharding:
    """Moments, found by name and shape, lie as their parameters do, and so do the exponents of their blocks, along each
    axis that has enough of them. Stacks of matrices that belong to a parameter are cut along the stack, where
    parameters are cut at all; everything else of the optimizer is replicated.

    Args:
        trainable: the parameters that the optimizer updates.
        tx: the optimizer.
        param_shardings: of all parameters.
        mesh: the device mesh.
    """
    storage = {name: NamedSharding(mesh, param_sharding.storage) for name, param_sharding in param_shardings.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    params = {name: storage[name] for name in trainable}
    cut = any("data" in spec_axes(entry) for sharding in params.values() for entry in sharding.spec)
    stacked = NamedSharding(mesh, PartitionSpec("data")) if cut else replicated

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        name = keys[-1] if keys and keys[-1] in params else None
        if name is not None and leaf.shape == trainable[name].shape:
            return params[name]
        if name is not None and path[-1] == _BLOCK_EXPONENTS:
            return _cut_alike(params[name], leaf.shape)
        # Factors and bases of a parameter's blocks are as many numbers as the parameter. Other statistics are few.
        return stacked if name is not None and _is_stack(leaf, mesh.shape["data"]) else replicated

    # Shapes alone, since a large optimizer state would not fit on one device.
    opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(tx.init, dict(trainable)))
    return StateSharding(mesh, param_shardings, TrainedShardings(params, opt_state), storage)


def _cut_alike(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array of this shape, cut along the same axes wherever their sizes can be cut so."""
    mesh, spec = sharding.mesh, sharding.spec
    pieces = [math.prod(mesh.shape[axis] for axis in spec_axes(entry)) for entry in spec]
    entries = [None if size % n else entry for size, n, entry in zip(shape, pieces, spec, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _is_stack(leaf: Any, pieces: int) -> bool:
    """True for an array [stack, rows, columns] that can be cut into so many pieces along its stack."""
    return len(leaf.shape) == _STACK_DIMS and leaf.shape[0] % pieces == 0
