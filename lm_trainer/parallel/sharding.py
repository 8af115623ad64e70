"""Shardings of the arrays of the training state in storage, during computation, and while gradients are summed.

They follow from shapes and logical axes. Nothing that determines the order of a sum depends on the mesh.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jax.sharding import Mesh, PartitionSpec

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import BATCH_AXES, AxisRules, partition_spec, spec_axes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamSharding:
    """Shardings of a parameter, its gradient and its optimizer moments, and the partitioning of sums over it."""

    storage: PartitionSpec
    """Sharding between steps."""
    compute: PartitionSpec
    """Sharding while a microbatch is computed: gathered over the batch axes."""
    scatter_dim: int | None
    """Dimension along which gradients are reduce-scattered; None if no dimension is divisible."""
    scatter_chunks: int
    """Maximum number of shards that `scatter_dim` can be split into. It is a power of two that follows from the shape
    and the maximum number of devices of a run, never from the mesh."""
    norm_grid: tuple[int, ...] = ()
    """Number of blocks along each dimension whose squares are summed separately; empty: one along each. No sharding of
    the state is finer, so every block is on one device and no sharding determines the order of additions."""
    combine: Literal["sum", "maximum"] = "sum"
    """Operation that combines the gradients of microbatches and devices."""

    def as_maximum(self) -> ParamSharding:
        """Returns the shardings for a small parameter whose gradients are combined by their maximum."""
        return replace(self, scatter_dim=None, combine="maximum")


def plan_shardings(
    leaves: Mapping[str, tuple[tuple[int, ...], Sequence[str | None]]],
    mesh: Mesh,
    *,
    param_rules: AxisRules,
    compute_rules: AxisRules,
    max_shards: int,
) -> dict[str, ParamSharding]:
    """Plans the sharding of every parameter.

    A dimension that is not divisible by the batch axes of the mesh is replicated, with a warning. A dimension that is
    not divisible by another axis is an error, because the user requested that axis by name.

    Args:
        leaves: name -> (shape, logical axes) of the parameters.
        mesh: device mesh.
        param_rules: rules for storage.
        compute_rules: rules for computation; batch axes in them are ignored.
        max_shards: maximum number of shards of a batch, which is the number of microbatches.

    Raises:
        UserError: if two axes of a parameter are mapped to the same mesh axis, or a dimension is not divisible.
    """
    shardings, replicated = {}, []
    for name, (shape, axes) in leaves.items():
        requested = partition_spec(name, axes, param_rules)
        compute = _remove_batch_axes(partition_spec(name, axes, compute_rules))
        _check_even(name, shape, axes, requested, mesh)
        storage = _drop_uneven(shape, requested, mesh)
        if storage != requested:
            replicated.append(name)
        # `requested`, not `storage`: another mesh may be able to shard what this mesh cannot, and both must add in the
        # same order.
        dim = _scatter_dim(shape, requested, compute)
        chunks = 1 if dim is None else _common_power_of_two(shape[dim], max_shards)
        grid = _norm_grid(shape, requested, mesh, max_shards)
        shardings[name] = ParamSharding(storage, compute, dim if chunks > 1 else None, chunks, grid)
    # An abstract mesh is not used for training, so it needs no warning.
    if replicated and isinstance(mesh, Mesh):
        logger.warning("not sharded, because the data axis does not divide them: %s", ", ".join(replicated))
    return shardings


def _remove_batch_axes(spec: PartitionSpec) -> PartitionSpec:
    entries = [tuple(a for a in spec_axes(entry) if a not in BATCH_AXES) for entry in spec]
    return PartitionSpec(*(e if len(e) > 1 else (e[0] if e else None) for e in entries))


def _check_even(name: str, shape: tuple[int, ...], axes: Sequence[str | None], spec: PartitionSpec, mesh: Mesh) -> None:
    for size, logical, entry in zip(shape, axes, spec, strict=False):
        sizes = {f"{a}_axis_size": mesh.shape[a] for a in spec_axes(entry) if a not in BATCH_AXES}
        if size % math.prod(sizes.values()):
            factors = " x ".join(f"{key}={shards}" for key, shards in sizes.items())
            raise UserError(
                f"{name}: its axis {logical!r} of size {size} cannot be cut into {factors} pieces; "
                f"choose a divisor of {size}"
            )


def _drop_uneven(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    entries = []
    for size, entry in zip(shape, spec, strict=False):
        shards = math.prod(mesh.shape[a] for a in spec_axes(entry))
        entries.append(None if size % shards else entry)
    return PartitionSpec(*entries)


def _scatter_dim(shape: tuple[int, ...], storage: PartitionSpec, compute: PartitionSpec) -> int | None:
    """Returns the dimension that storage shards over the batch axes; else the one with most factors of two, then
    largest.

    `storage` is the sharding that the rules request, not the one that this mesh allows, because the choice must be the
    same on every mesh.
    """
    for dim, entry in enumerate(storage):
        if any(a in BATCH_AXES for a in spec_axes(entry)):
            # Sums scattered along this dimension have the storage sharding. If another axis already shards the
            # dimension during computation, the two shardings do not nest, and the gradient is summed as a vector.
            return dim if not spec_axes(compute[dim]) else None
    free = [d for d in range(len(shape)) if not spec_axes(compute[d])]
    # `n & -n` is the largest power of two that divides n; such a dimension can be split over the most devices.
    return max(free, key=lambda d: (shape[d] & -shape[d], shape[d]), default=None)


def _norm_grid(shape: tuple[int, ...], storage: PartitionSpec, mesh: Mesh, max_shards: int) -> tuple[int, ...]:
    """Returns the number of blocks along each dimension, such that any sharding over the batch axes has whole blocks.

    Every dimension is split, not only the dimension that is sharded in storage, so that `fsdp_axis` does not affect any
    bit either. The shards of the other axes are split separately, because a block across two shards would be on two
    devices.
    """
    fixed = [math.prod(mesh.shape[a] for a in spec_axes(entry) if a not in BATCH_AXES) for entry in storage]
    return tuple(
        shards * _common_power_of_two(size // shards, max_shards) for size, shards in zip(shape, fixed, strict=True)
    )


def _common_power_of_two(size: int, max_shards: int) -> int:
    """Returns the largest power of two that divides both `size` and `max_shards`."""
    common = math.gcd(size, max_shards)
    return common & -common
