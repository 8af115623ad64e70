"""Sums that groups of devices have computed: how they lie there, and their addition in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.ordered_sum import sum_over_shards, tree_sum
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.gradient import Sums
from lm_trainer.step.groups import ModelParallelGroup, stack_groups

Layouts = Mapping[str, ParamSharding]
"""By the names of the tree of the sums."""


def sums_on_group(group: ModelParallelGroup, layouts: Layouts) -> Any:
    """The shardings of a microbatch's sums, with an axis in front, on its group: those of the parameters there."""
    tree = {name: group.sharding(None, *layout.compute) for name, layout in layouts.items()}
    return Sums(group.sharding(), tree)  # pyright: ignore[reportArgumentType]


def stack_sums(parts: Sequence[Sums], layouts: Layouts, mesh: Mesh) -> Sums:
    """The sums [1, ...] of each local group as [batch shards, ...] over all groups, without a copy."""
    return Sums(
        {name: stack_groups([p.scalars[name] for p in parts], PartitionSpec(), mesh) for name in parts[0].scalars},
        {name: stack_groups([p.tree[name] for p in parts], x.compute, mesh) for name, x in layouts.items()},
    )


def stacked_shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], layouts: Layouts, mesh: Mesh, scalars: Sequence[str]
) -> Sums:
    """The shapes of what `stack_sums` returns.

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


def add_over_groups(stacked: Sums, layouts: Layouts, mesh: Mesh, dtypes: Mapping[str, Any] | None = None) -> Sums:
    """Adds what `stack_sums` returned: scalars on every device, the tree as `sum_over_shards` leaves it.

    Args:
        stacked: the sums.
        layouts: of the tree.
        mesh: the device mesh.
        dtypes: as for `sum_over_shards`.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Sums(
        {name: tree_sum(jax.lax.with_sharding_constraint(x, everywhere)) for name, x in stacked.scalars.items()},
        sum_over_shards(stacked.tree, layouts, mesh, dtypes),
    )
