"""Sums that groups of devices compute: their shardings, and their addition in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.ordered_sum import add_parts, sum_over_shards, sum_parts_over_shards
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.parallel.tree_sum import Shares, tree_sum
from lm_trainer.step.dispatch.device_groups import ModelParallelGroup, stack_groups
from lm_trainer.step.dispatch.mesh_group import MeshGroup
from lm_trainer.step.loss.gradient import Sums

if TYPE_CHECKING:
    from jax.typing import DTypeLike

Layouts = Mapping[str, ParamSharding]
"""Shardings of the arrays in the tree of the sums, by parameter name."""


def sum_shardings_on_group(group: ModelParallelGroup | MeshGroup, layouts: Layouts) -> PyTree:
    """Returns the shardings of a microbatch's sums on its group: the parameters' shardings, with a leading axis."""
    tree = {name: group.stacked_sharding(*layout.compute) for name, layout in layouts.items()}
    return Sums(group.stacked_sharding(), tree)  # pyright: ignore[reportArgumentType]


def stack_sums(parts: Sequence[Sequence[Sums]], shares: Shares, layouts: Layouts, mesh: Mesh) -> list[Sums]:
    """Joins the partial sums [1, ...] of the local groups into [batch shards, ...] over all groups, without a copy.

    Args:
        parts: partial sums of each local group.
        shares: division of the microbatches among all groups.
        layouts: shardings of the tree of the sums.
        mesh: device mesh.

    Returns:
        The first partial sums of all groups, then the second ones, and so on. A group that has fewer partial sums
        repeats its first one.
    """
    slots = range(shares.max_parts)
    return [
        _stack_group_sums([sums[slot if slot < len(sums) else 0] for sums in parts], layouts, mesh) for slot in slots
    ]


def _stack_group_sums(parts: Sequence[Sums], layouts: Layouts, mesh: Mesh) -> Sums:
    return Sums(
        {name: stack_groups([p.scalars[name] for p in parts], PartitionSpec(), mesh) for name in parts[0].scalars},
        {name: stack_groups([p.tree[name] for p in parts], x.compute, mesh) for name, x in layouts.items()},
    )


def stacked_shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], layouts: Layouts, mesh: Mesh, scalars: Sequence[str]
) -> Sums:
    """Returns the shapes of one of the results of `stack_sums`.

    Args:
        shapes: shapes of the arrays in the tree, without the axis over groups.
        layouts: shardings of the tree of the sums.
        mesh: device mesh.
        scalars: names of the float32 scalars.
    """

    def stacked_shape(shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, *spec))
        return jax.ShapeDtypeStruct((batch_shards(mesh), *shape), dtype, sharding=sharding)  # pyright: ignore[reportReturnType]

    return Sums(
        {name: stacked_shape((), jnp.float32, PartitionSpec()) for name in scalars},
        {name: stacked_shape(shapes[name].shape, shapes[name].dtype, x.compute) for name, x in layouts.items()},
    )


def add_over_groups(
    stacked: Sequence[Sums],
    shares: Shares,
    layouts: Layouts,
    mesh: Mesh,
    dtypes: Mapping[str, DTypeLike] | None = None,
) -> Sums:
    """Adds the results of `stack_sums`: scalars on every device, and the tree sharded as by `sum_over_shards`.

    Args:
        stacked: the results of `stack_sums`.
        shares: division of the microbatches among the groups.
        layouts: shardings of the tree of the sums.
        mesh: device mesh.
        dtypes: as for `sum_over_shards`.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    scalars = [
        {name: jax.lax.with_sharding_constraint(x, everywhere) for name, x in part.scalars.items()} for part in stacked
    ]
    trees = [part.tree for part in stacked]
    if shares.is_even:
        added = {name: tree_sum(x) for name, x in scalars[0].items()}
        return Sums(added, sum_over_shards(trees[0], layouts, mesh, dtypes))
    added = {name: add_parts(jnp.stack([part[name] for part in scalars], axis=1), shares) for name in scalars[0]}
    return Sums(added, sum_parts_over_shards(trees, shares, layouts, mesh, dtypes))
