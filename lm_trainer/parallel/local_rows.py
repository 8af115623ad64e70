"""Computations that each device does on its own rows of a batch, where XLA would not partition by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
from jax.sharding import PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES

Tree = TypeVar("Tree")
Arrays: TypeAlias = "jax.Array | tuple[Arrays, ...]"


def map_local_rows(
    function: Callable[..., Tree], rows: tuple[jax.Array, *tuple[Arrays, ...]], replicated: Sequence[jax.Array]
) -> Tree:
    """Computes `function(*rows, *replicated)` on each device along the batch axes, for the rows on this device.

    In a program for one device, or for a microbatch on one device, this is an ordinary call.

    Args:
        function: function of arrays. The first dimension of its results must be divided among the devices like the
            rows, and each part must depend only on the rows of the same device.
        rows: arrays whose first dimension is the rows of the batch, or several elements per row; or tuples of results
            of another call.
        replicated: arrays that are replicated on all devices; their gradients are summed over the devices.
    """
    mesh = jax.typeof(rows[0]).sharding.mesh
    free = [axis for axis in BATCH_AXES if axis in mesh.axis_names and axis not in mesh.manual_axes]
    axes = tuple(axis for axis in free if mesh.shape[axis] > 1)
    if not axes or rows[0].shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        return function(*rows, *replicated)
    sharded = PartitionSpec(axes)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*[sharded] * len(rows), *[PartitionSpec()] * len(replicated)),
        out_specs=sharded,
        axis_names=set(axes),
        check_vma=False,
    )(*rows, *replicated)
