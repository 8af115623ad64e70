"""Shardings of the arrays of the training state: in storage, during computation, and while gradients are summed.

All of it follows from shapes and logical axes. Whatever decides the order of a sum does not depend on the mesh.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import BATCH_AXES, AxisRules, partition_spec, spec_axes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamSharding:
    """Shardings of one parameter, its gradient and its optimizer moments, and how sums over it are partitioned."""

    storage: PartitionSpec
    """Between steps."""
    compute: PartitionSpec
    """While a microbatch is computed: gathered over the batch axes."""
    scatter_dim: int | None
    """The dimension along which gradients are reduce-scattered, None when no dimension can be split."""
    scatter_chunks: int
    """The most shards that `scatter_dim` can be split into: a power of two that follows from the shape and the most
    devices that a run may have, never from the mesh."""
    norm_grid: tuple[int, ...] = ()
    """Blocks along each dimension whose squares are summed on their own; empty: one along each. No sharding of the
    state is finer, so that every block lies on one device and no sharding decides the order of additions."""


def plan_shardings(
    leaves: Mapping[str, tuple[tuple[int, ...], Sequence[str | None]]],
    mesh: Mesh,
    *,
    param_rules: AxisRules,
    compute_rules: AxisRules,
    max_shards: int,
) -> dict[str, ParamSharding]:
    """Plans the sharding of every parameter.

    A dimension that the batch axes of the mesh do not divide is replicated, which is logged. One that another axis does
    not divide is an error, because the user asked for that axis by name.

    Args:
        leaves: name -> (shape, logical axes) of the parameters.
        mesh: the device mesh.
        param_rules: rules for the state in storage.
        compute_rules: rules for the computation; its batch axes are ignored.
        max_shards: the most shards that a batch may ever have (the number of microbatches).

    Raises:
        UserError: two axes of a parameter on one mesh axis, or one that does not divide a dimension.
    """
    shardings, replicated = {}, []
    for name, (shape, axes) in leaves.items():
        wanted = partition_spec(name, axes, param_rules)
        compute = _without_batch_axes(partition_spec(name, axes, compute_rules))
        _check_even(name, shape, axes, wanted, mesh)
        storage = _drop_uneven(shape, wanted, mesh)
        if storage != wanted:
            replicated.append(name)
        # `wanted`, not `storage`: what this mesh cannot shard another one can, and both must add in the same order.
        dim = _scatter_dim(shape, wanted, compute)
        chunks = 1 if dim is None else _power_of_two(shape[dim], max_shards)
        grid = _norm_grid(shape, wanted, mesh, max_shards)
        shardings[name] = ParamSharding(storage, compute, dim if chunks > 1 else None, chunks, grid)
    # Nobody trains on an abstract mesh, so nobody needs to be told.
    if replicated and isinstance(mesh, Mesh):
        logger.warning("not sharded, because the data axis does not divide them: %s", ", ".join(replicated))
    return shardings


def _without_batch_axes(spec: PartitionSpec) -> PartitionSpec:
    entries = [tuple(a for a in spec_axes(entry) if a not in BATCH_AXES) for entry in spec]
    return PartitionSpec(*(e if len(e) > 1 else (e[0] if e else None) for e in entries))


def _check_even(name: str, shape: tuple[int, ...], axes: Sequence[str | None], spec: PartitionSpec, mesh: Mesh) -> None:
    for size, logical, entry in zip(shape, axes, spec, strict=False):
        sizes = {f"{a}_axis_size": mesh.shape[a] for a in spec_axes(entry) if a not in BATCH_AXES}
        if size % math.prod(sizes.values()):
            asked = " x ".join(f"{key}={shards}" for key, shards in sizes.items())
            raise UserError(
                f"{name}: its axis {logical!r} of size {size} cannot be cut into {asked} pieces; "
                f"choose a divisor of {size}"
            )


def _drop_uneven(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    entries = []
    for size, entry in zip(shape, spec, strict=False):
        shards = math.prod(mesh.shape[a] for a in spec_axes(entry))
        entries.append(None if size % shards else entry)
    return PartitionSpec(*entries)


def _scatter_dim(shape: tuple[int, ...], storage: PartitionSpec, compute: PartitionSpec) -> int | None:
    """The dimension that storage shards over the batch axes; else the one with most factors of two, then the largest.

    `storage` is what the rules ask for, not what this mesh can do: the choice must be the same on every mesh.
    """
    for dim, entry in enumerate(storage):
        if any(a in BATCH_AXES for a in spec_axes(entry)):
            # Sums scattered along this dimension are where they are stored. Where another axis already shards it
            # during computation the two shardings do not nest, and the gradient is summed as a vector.
            return dim if not spec_axes(compute[dim]) else None
    free = [d for d in range(len(shape)) if not spec_axes(compute[d])]
    # `n & -n` is the largest power of two that divides n: with it the dimension can be split for the most devices.
    return max(free, key=lambda d: (shape[d] & -shape[d], shape[d]), default=None)


def _norm_grid(shape: tuple[int, ...], storage: PartitionSpec, mesh: Mesh, max_shards: int) -> tuple[int, ...]:
    """The blocks along each dimension: those that any sharding over the batch axes consists of.

    Every dimension is split, not only the one that is stored sharded, so that `fsdp_axis` decides no bit either. The
    shards of the other axes are split each on their own: a block that spanned two of them would lie on two devices.
    """
    fixed = [math.prod(mesh.shape[a] for a in spec_axes(entry) if a not in BATCH_AXES) for entry in storage]
    return tuple(shards * _power_of_two(size // shards, max_shards) for size, shards in zip(shape, fixed, strict=True))


def _power_of_two(size: int, max_shards: int) -> int:
    """The largest power of two that divides `size` and `max_shards`."""
    common = math.gcd(size, max_shards)
    return common & -common
