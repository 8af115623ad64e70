"""How each array of the training state lies on the mesh: in storage, during computation, and while it is summed.

Everything here follows from shapes and logical axes; what decides the order of a sum does not depend on the mesh.
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
    """Where one parameter (and its gradient and optimizer moments) lies."""

    storage: PartitionSpec
    """Parameters and optimizer state between steps."""
    compute: PartitionSpec
    """While a microbatch is computed: gathered over the batch axes."""
    sum_dim: int | None
    """The dimension that is cut in `chunks` pieces for sums, None when no dimension can be cut."""
    chunks: int
    """A power of two that depends on the shape and the most devices that a run may have, never on the mesh."""
    grid: tuple[int, ...] = ()
    """Into how many pieces each dimension is cut for norms; empty: one each. No mesh and no rule for the state at rest
    cuts finer, and so neither of them decides the order of additions."""


def plan_shardings(
    leaves: Mapping[str, tuple[tuple[int, ...], Sequence[str | None]]],
    mesh: Mesh,
    *,
    param_rules: AxisRules,
    compute_rules: AxisRules,
    max_shards: int,
) -> dict[str, ParamSharding]:
    """The param_sharding of every parameter, given as name -> (shape, logical axes).

    A dimension that the batch axes of the mesh do not divide stays whole, which is logged; one that another axis
    does not divide is an error, because the user asked for that cut by name.

    Args:
        leaves: the parameters.
        mesh: the device mesh.
        param_rules: rules for the state in storage.
        compute_rules: rules for the computation; its batch axes are ignored.
        max_shards: the most pieces that a batch may ever be cut into (the number of microbatches).

    Raises:
        UserError: two axes of a parameter on one mesh axis, or one that does not divide a dimension.
    """
    param_shardings, whole = {}, []
    for name, (shape, axes) in leaves.items():
        storage = partition_spec(name, axes, param_rules)
        compute = _without_batch_axes(partition_spec(name, axes, compute_rules))
        _check_even(name, shape, axes, storage, mesh)
        kept = _drop_uneven(shape, storage, mesh)
        if kept != storage:
            whole.append(name)
        sum_dim = _sum_dim(shape, storage, compute)
        chunks = 1 if sum_dim is None else _chunks(shape[sum_dim], max_shards)
        grid = _grid(shape, storage, mesh, max_shards)
        param_shardings[name] = ParamSharding(kept, compute, sum_dim if chunks > 1 else None, chunks, grid)
    if whole:
        logger.warning("not sharded, because the data axis does not divide them: %s", ", ".join(whole))
    return param_shardings


def _without_batch_axes(spec: PartitionSpec) -> PartitionSpec:
    entries = [tuple(a for a in spec_axes(entry) if a not in BATCH_AXES) for entry in spec]
    return PartitionSpec(*(e if len(e) > 1 else (e[0] if e else None) for e in entries))


def _check_even(name: str, shape: tuple[int, ...], axes: Sequence[str | None], spec: PartitionSpec, mesh: Mesh) -> None:
    for size, logical, entry in zip(shape, axes, spec, strict=False):
        cuts = {f"{a}_axis_size": mesh.shape[a] for a in spec_axes(entry) if a not in BATCH_AXES}
        if size % math.prod(cuts.values()):
            asked = " x ".join(f"{key}={pieces}" for key, pieces in cuts.items())
            raise UserError(
                f"{name}: its axis {logical!r} of size {size} cannot be cut into {asked} pieces; "
                f"choose a divisor of {size}"
            )


def _drop_uneven(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    entries = []
    for size, entry in zip(shape, spec, strict=False):
        pieces = math.prod(mesh.shape[a] for a in spec_axes(entry))
        entries.append(None if size % pieces else entry)
    return PartitionSpec(*entries)


def _sum_dim(shape: tuple[int, ...], storage: PartitionSpec, compute: PartitionSpec) -> int | None:
    """The dimension cut over the batch axes at rest; otherwise the one with most factors of two, then the largest.

    `rest` is what the rules ask for, not what this mesh can do: the choice must be the same on every mesh.
    """
    for dim, entry in enumerate(storage):
        if any(a in BATCH_AXES for a in spec_axes(entry)):
            return dim if not spec_axes(compute[dim]) else None
    free = [d for d in range(len(shape)) if not spec_axes(compute[d])]
    return max(free, key=lambda d: (shape[d] & -shape[d], shape[d]), default=None)


def _grid(shape: tuple[int, ...], storage: PartitionSpec, mesh: Mesh, max_shards: int) -> tuple[int, ...]:
    """Pieces that any cut over the batch axes consists of; each lies within one piece of the cut over other axes."""
    held = [math.prod(mesh.shape[a] for a in spec_axes(entry) if a not in BATCH_AXES) for entry in storage]
    return tuple(cut * _chunks(size // cut, max_shards) for size, cut in zip(shape, held, strict=True))


def _chunks(size: int, max_shards: int) -> int:
    """The largest power of two that divides `size` and `max_shards`."""
    common = math.gcd(size, max_shards)
    return common & -common
