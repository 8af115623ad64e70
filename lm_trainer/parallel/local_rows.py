"""Computations of each device on its own rows of a batch, where XLA would not partition them by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.sharding import PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES

Tree = TypeVar("Tree")


def map_local_rows(function: Callable[..., Tree], rows: Sequence[jax.Array], replicated: Sequence[jax.Array]) -> Tree:
    """Computes `function(*rows, *replicated)` on each device of the batch axes, for the rows on this device.

    In a program for one device, or for a microbatch on one device, this is a plain call.

    Args:
        function: function of arrays; its results have rows as first dimension, and each row must depend only on the
            same row of the arguments.
        rows: arrays whose first dimension is the rows of the batch, or several elements for each row.
        replicated: arrays that are replicated on every device; their gradients are summed over the devices.
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
