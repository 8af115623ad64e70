"""Computations that each device makes from its own rows of a batch, where XLA would not divide them so by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.sharding import PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES

Tree = TypeVar("Tree")


def from_own_rows(function: Callable[..., Tree], rows: Sequence[jax.Array], whole: Sequence[jax.Array]) -> Tree:
    """Computes `function(*rows, *whole)` on each device of the batch's axes from the rows that it has.

    In the program of one device, or of a microbatch that one device has whole, this is the call itself.

    Args:
        function: of arrays, with one or several that have their rows first; each row must follow from its own alone.
        rows: arrays whose first dimension is the rows of the batch, or several elements for each.
        whole: arrays that every device needs whole; their gradients are added up over the devices.
    """
    mesh = jax.typeof(rows[0]).sharding.mesh
    free = [axis for axis in BATCH_AXES if axis in mesh.axis_names and axis not in mesh.manual_axes]
    axes = tuple(axis for axis in free if mesh.shape[axis] > 1)
    if not axes or rows[0].shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        return function(*rows, *whole)
    cut, uncut = PartitionSpec(axes), PartitionSpec()
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*[cut] * len(rows), *[uncut] * len(whole)),
        out_specs=cut,
        axis_names=set(axes),
        check_vma=False,
    )(*rows, *whole)
