"""Parameters outside of training, cut over devices of which none need hold them whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.tree import named_leaves
from lm_trainer.step.state.model_def import ModelDef

_AXIS = "devices"
# As tensor parallelism cuts them (Shoeybi et al. 2019, arXiv 1909.08053, section 3): no layer need be gathered.
_CUT = ("experts", "heads", "kv_heads", "mlp", "vocab", "embed")


def inference_shardings(model: ModelDef, devices: Sequence[Any]) -> dict[str, NamedSharding]:
    """Cuts each parameter over all devices along one dimension that they divide; vectors of a layer stay whole.

    Args:
        model: whose parameters they are.
        devices: of this process.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))

    def sharding(shape: tuple[int, ...], axes: Sequence[str | None]) -> NamedSharding:
        free = [dim for dim, axis in enumerate(axes) if axis != "layers" and shape[dim] % mesh.size == 0]
        vector = math.prod(shape) == max(shape, default=1) * (shape[0] if axes and axes[0] == "layers" else 1)
        if vector or not free or mesh.size == 1:
            return NamedSharding(mesh, PartitionSpec())
        rank = {axis: at for at, axis in enumerate(_CUT)}
        chosen = min(free, key=lambda dim: (rank.get(str(axes[dim]), len(_CUT)), -shape[dim]))
        return NamedSharding(mesh, PartitionSpec(*(_AXIS if dim == chosen else None for dim in range(len(shape)))))

    return {name: sharding(x.shape, model.axes[name]) for name, x in model.shapes.items()}


def shard_for_inference(model: ModelDef, params: Any, devices: Sequence[Any] | None = None) -> dict[str, jax.Array]:
    """Parameters by name as `spread` cuts them; arrays that lie on devices already stay where they are.

    Args:
        model: whose parameters they are.
        params: nested dicts of arrays.
        devices: of this process; None: all of them.
    """
    shardings = inference_shardings(model, devices or jax.local_devices())
    named: Mapping[str, Any] = named_leaves(params)
    return {name: x if isinstance(x, jax.Array) else jax.device_put(x, shardings[name]) for name, x in named.items()}
