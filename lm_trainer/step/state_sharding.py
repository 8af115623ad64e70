"""The sharding of everything that training holds: parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.sharding import ParamSharding


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
    """Moments, found by name and shape, lie as their parameters do; everything else of the optimizer is replicated.

    Args:
        trainable: the parameters that the optimizer updates.
        tx: the optimizer.
        param_shardings: of all parameters.
        mesh: the device mesh.
    """
    storage = {name: NamedSharding(mesh, param_sharding.storage) for name, param_sharding in param_shardings.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    params = {name: storage[name] for name in trainable}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # A statistic of a parameter (a row mean, a factor) may stand under its name: it is small, and lies everywhere.
        name = path[-1].key if path and isinstance(path[-1], jax.tree_util.DictKey) else None
        return params[name] if name in params and leaf.shape == trainable[name].shape else replicated

    # Shapes alone, since a large optimizer state would not fit on one device.
    opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(tx.init, dict(trainable)))
    return StateSharding(mesh, param_shardings, TrainedShardings(params, opt_state), storage)
