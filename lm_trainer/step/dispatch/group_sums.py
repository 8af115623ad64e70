"""Sums that groups of devices have computed: how they lie there, and their addition in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.ordered_sum import add_parts, sum_over_shards, sum_parts_over_shards
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.parallel.tree_sum import Shares, tree_sum
from lm_trainer.step.dispatch.device_groups import ModelParallelGroup, stack_groups
from lm_trainer.step.loss.gradient import Sums

Layouts = Mapping[str, ParamSharding]
"""By the names of the tree of the sums."""


def sums_on_group(group: ModelParallelGroup, layouts: Layouts) -> Any:
    """The shardings of a microbatch's sums, with an axis in front, on its group: those of the parameters there."""
    tree = {name: group.sharding(None, *layout.compute) for name, layout in layouts.items()}
    return Sums(group.sharding(), tree)  # pyright: ignore[reportArgumentType]


def stack_sums(parts: Sequence[Sequence[Sums]], shares: Shares, layouts: Layouts, mesh: Mesh) -> list[Sums]:
    """The partial sums [1, ...] of each local group as [batch shards, ...] over all groups, without a copy.

    Args:
        parts: for each local group its partial sums.
        shares: of all groups.
        layouts: of the tree.
        mesh: the device mesh.

    Returns:
        The first ones of all groups, the second ones and so on; a group that has no more gives its first one again.
    """
    slots = range(shares.most_parts)
    return [_stack([sums[slot if slot < len(sums) else 0] for sums in parts], layouts, mesh) for slot in slots]


def _stack(parts: Sequence[Sums], layouts: Layouts, mesh: Mesh) -> Sums:
    return Sums(
        {name: stack_groups([p.scalars[name] for p in parts], PartitionSpec(), mesh) for name in parts[0].scalars},
        {name: stack_groups([p.tree[name] for p in parts], x.compute, mesh) for name, x in layouts.items()},
    )


def stacked_shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], layouts: Layouts, mesh: Mesh, scalars: Sequence[str]
) -> Sums:
    """The shapes of one of those that `stack_sums` returns.

    Args:
        shapes: of the tree, without the axis over groups.
        layouts: of the tree.
        mesh: the device mesh.
        scalars: names of the float32 scalars.
    """

    def stacked(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, *spec))
        return jax.ShapeDtypeStruct((batch_shards(mesh), *shape), dtype, sharding=sharding)

    return Sums(
        {name: stacked((), jnp.float32, PartitionSpec()) for name in scalars},
        {name: stacked(shapes[name].shape, shapes[name].dtype, x.compute) for name, x in layouts.items()},
    )


def add_over_groups(
    stacked: Sequence[Sums], shares: Shares, layouts: Layouts, mesh: Mesh, dtypes: Mapping[str, Any] | None = None
) -> Sums:
    """Adds what `stack_sums` returned: scalars on every device, the tree as `sum_over_shards` leaves it.

    Args:
        stacked: the sums.
        shares: of the groups.
        layouts: of the tree.
        mesh: the device mesh.
        dtypes: as for `sum_over_shards`.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    scalars = [
        {name: jax.lax.with_sharding_constraint(x, everywhere) for name, x in part.scalars.items()} for part in stacked
    ]
    trees = [part.tree for part in stacked]
    if shares.even:
        added = {name: tree_sum(x) for name, x in scalars[0].items()}
        return Sums(added, sum_over_shards(trees[0], layouts, mesh, dtypes))
    added = {name: add_parts(jnp.stack([part[name] for part in scalars], axis=1), shares) for name in scalars[0]}
    return Sums(added, sum_parts_over_shards(trees, shares, layouts, mesh, dtypes))
