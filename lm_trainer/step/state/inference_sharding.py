"""Parameters outside of training, sharded over devices so that no device needs to hold all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.core.tree import named_leaves
from lm_trainer.step.state.model_def import ModelDef

_AXIS = "devices"
# As in tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, section 3), so that no layer needs to be gathered.
_SHARDED_AXES = ("experts", "heads", "kv_heads", "mlp", "vocab", "embed")


def inference_shardings(model: ModelDef, devices: Sequence[Device]) -> dict[str, NamedSharding]:
    """Shards each parameter over all devices along one divisible dimension. Vectors of a layer are replicated.

    Args:
        model: model that the parameters belong to.
        devices: devices of this process.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))

    def sharding(shape: tuple[int, ...], axes: Sequence[str | None]) -> NamedSharding:
        free = [dim for dim, axis in enumerate(axes) if axis != "layers" and shape[dim] % mesh.size == 0]
        vector = math.prod(shape) == max(shape, default=1) * (shape[0] if axes and axes[0] == "layers" else 1)
        if vector or not free or mesh.size == 1:
            return NamedSharding(mesh, PartitionSpec())
        rank = {axis: index for index, axis in enumerate(_SHARDED_AXES)}
        chosen = min(free, key=lambda dim: (rank.get(str(axes[dim]), len(_SHARDED_AXES)), -shape[dim]))
        return NamedSharding(mesh, PartitionSpec(*(_AXIS if dim == chosen else None for dim in range(len(shape)))))

    return {name: sharding(x.shape, model.axes[name]) for name, x in model.shapes.items()}


def shard_for_inference(
    model: ModelDef, params: PyTree, devices: Sequence[Device] | None = None
) -> dict[str, jax.Array]:
    """Puts parameters on devices, sharded by `inference_shardings`. JAX arrays stay on their current devices.

    Args:
        model: model that the parameters belong to.
        params: nested dict of arrays.
        devices: devices of this process; None: all of them.
    """
    shardings = inference_shardings(model, devices or jax.local_devices())
    named: Mapping[str, np.ndarray | jax.Array] = named_leaves(params)
    return {name: x if isinstance(x, jax.Array) else jax.device_put(x, shardings[name]) for name, x in named.items()}
