"""Sharding of the training state: parameters and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.logit_clip import LogitClip
from lm_trainer.parallel.mesh import spec_axes
from lm_trainer.parallel.sharding import ParamSharding

_STACK_DIMS = 3
_BLOCK_EXPONENTS = jax.tree_util.GetAttrKey("block_exponents")
"""Last key in the path of the block exponents of an array; see `lm_trainer.core.block_float`."""


class TrainedShardings(NamedTuple):
    """Storage shardings of the arrays of a `TrainState`."""

    params: dict[str, NamedSharding]
    opt_state: PyTree


@dataclass(frozen=True)
class StateSharding:
    """Shardings of all arrays that a step reads and writes."""

    mesh: Mesh
    params: Mapping[str, ParamSharding]
    """Shardings of each parameter, by name."""
    trained: TrainedShardings
    """Shardings of the trained state."""
    storage: Mapping[str, NamedSharding]
    """Storage sharding of every parameter, trained or frozen."""
    loads: Mapping[str, float | None] = field(default_factory=dict)
    """As `ModelDef.loads`."""
    logit_clips: Mapping[str, LogitClip] = field(default_factory=dict)
    """As `ModelDef.logit_clips`."""

    @property
    def measured(self) -> Collection[str]:
        """Names of the trained parameters that the optimizer does not update."""
        return self.loads.keys() | self.logit_clips.keys()


def plan_state_sharding(
    trainable: Mapping[str, jax.ShapeDtypeStruct],
    tx: optax.GradientTransformation,
    param_shardings: Mapping[str, ParamSharding],
    mesh: Mesh,
) -> StateSharding:
    """Plans the sharding of the state.

    Moments, found by name and shape, are sharded like their parameters. The exponents of their blocks are sharded along
    the same axes where these are divisible. Stacks of matrices that belong to a parameter are sharded along the stack
    if parameters are sharded at all. All other optimizer state is replicated.

    Args:
        trainable: parameters that the optimizer updates.
        tx: optimizer.
        param_shardings: shardings of all parameters.
        mesh: device mesh.
    """
    storage = {name: NamedSharding(mesh, param_sharding.storage) for name, param_sharding in param_shardings.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    params = {name: storage[name] for name in trainable}
    sharded = any("data" in spec_axes(entry) for sharding in params.values() for entry in sharding.spec)
    stacked = NamedSharding(mesh, PartitionSpec("data")) if sharded else replicated

    def leaf_sharding(path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        name = keys[-1] if keys and keys[-1] in params else None
        if name is not None and leaf.shape == trainable[name].shape:
            return params[name]
        if name is not None and path[-1] == _BLOCK_EXPONENTS:
            return _adapt_sharding(params[name], leaf.shape)
        # Factors and bases of the blocks of a parameter are as large as the parameter; other statistics are small.
        return stacked if name is not None and _is_stack(leaf, mesh.shape["data"]) else replicated

    # Only shapes, because a large optimizer state would not fit on one device.
    opt_state = jax.tree_util.tree_map_with_path(leaf_sharding, jax.eval_shape(tx.init, dict(trainable)))
    return StateSharding(mesh, param_shardings, TrainedShardings(params, opt_state), storage)


def _adapt_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the same sharding for an array of this shape; dimensions that are not divisible are not sharded."""
    mesh, spec = sharding.mesh, sharding.spec
    pieces = [math.prod(mesh.shape[axis] for axis in spec_axes(entry)) for entry in spec]
    entries = [None if size % n else entry for size, n, entry in zip(shape, pieces, spec, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _is_stack(leaf: jax.ShapeDtypeStruct, pieces: int) -> bool:
    """Returns true for an array [stack, rows, columns] whose stack is divisible into `pieces`."""
    return len(leaf.shape) == _STACK_DIMS and leaf.shape[0] % pieces == 0
