"""Computations that each device does on its own rows of a batch, where XLA would not partition by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES
from lm_trainer.parallel.target_platform import target_platform

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
    if target_platform() == "cpu":
        function, replicated = _sum_gradients_in_float32(function, len(rows), replicated)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*[sharded] * len(rows), *[PartitionSpec()] * len(replicated)),
        out_specs=sharded,
        axis_names=set(axes),
        check_vma=False,
    )(*rows, *replicated)


def _sum_gradients_in_float32(
    function: Callable[..., Tree], num_rows: int, replicated: Sequence[jax.Array]
) -> tuple[Callable[..., Tree], Sequence[jax.Array]]:
    """Returns `function` for replicated arrays in float32, and the arrays in float32. Then the sums of their gradients
    over the devices are float32 too.

    XLA for CPUs adds 16-bit values in float32 anyway, but it fails to convert the sums that `jax.shard_map` makes, and
    ends the process ("Invalid binary instruction opcode copy").
    """
    dtypes = [x.dtype for x in replicated]

    def with_float32(*arguments: jax.Array) -> Tree:
        narrowed = [x.astype(dtype) for x, dtype in zip(arguments[num_rows:], dtypes, strict=True)]
        return function(*arguments[:num_rows], *narrowed)

    return with_float32, [x.astype(jnp.float32) if x.dtype.itemsize == 2 else x for x in replicated]
