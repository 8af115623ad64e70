"""Groups of devices that compute one microbatch together, and the transfer of rows and parameters to these groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.parallel.mesh import BATCH_AXES, MESH_AXES, MODEL_PARALLEL_AXES, batch_shards
from lm_trainer.parallel.rehearsal import join_parts, local_devices, put_abstract
from lm_trainer.parallel.sharded_array import shards_by_device
from lm_trainer.parallel.tree_sum import Shares, TreeSum
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.model_parallel import shard_over_group
from lm_trainer.step.loss.gradient import MicrobatchFn
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import StateSharding

T = TypeVar("T")

LAYERS_AT_ONCE, MAX_LAYERS_AT_ONCE = 2, 4
"""Number of layers in the queue of a device, including the one being computed, and the maximum if memory is free.

A device idles only if the host pauses for longer than the queued layers take. More layers than the maximum would rarely
help: PJRT queues at most 32 programs on a GPU, and a layer with 2 microbatches has up to 6 of them."""


@dataclass(frozen=True)
class ModelParallelGroup:
    """Devices that compute one microbatch together: the devices along the axes that are not batch axes."""

    index: int
    """Index of the group among all batch shards of the mesh."""
    mesh: Mesh
    """Mesh of the group, with the same axes as the full mesh; the batch axes have size 1."""

    def sharding(self, *spec: str | tuple[str, ...] | None) -> NamedSharding:
        """Returns a sharding over the devices of this group."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @cached_property
    def local_devices(self) -> list[Device]:
        """Devices of the group that belong to this process."""
        return [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]

    @property
    def is_lead(self) -> bool:
        """True in exactly one of the processes that own devices of the group."""
        return self.mesh.devices.flat[0].process_index == jax.process_index()

    def put(self, values: PyTree) -> PyTree:
        """Replicates host arrays on the devices of the group. All processes of the group must pass equal arrays."""
        if (rehearsed := put_abstract(values, self.sharding(), "batch")) is not None:
            return rehearsed
        if len(self.local_devices) == self.mesh.size:
            return jax.device_put(values, self.sharding())
        # `device_put` would compare the values of all processes of the run.
        copies = [jax.device_put(values, device) for device in self.local_devices]

        def join(*parts: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(parts[0].shape, self.sharding(), parts)

        return jax.tree.map(join, *copies)

    def microbatch_positions(self, shares: Shares) -> range:
        """Returns the positions of the group's microbatches among all microbatches that `shares` divides."""
        return shares.terms(self.index)

    def make_tree_sum(self, shares: Shares, add: Callable[[T, T], T]) -> TreeSum[T]:
        """Makes the sum over the microbatches of the group, which is a part of the sum over all microbatches."""
        return TreeSum(shares.count, add, self.microbatch_positions(shares).start)

    def stacked_sharding(self, *spec: str | tuple[str, ...] | None) -> NamedSharding:
        """Returns a sharding of arrays whose leading axis is over batch shards; it has size 1 on the group."""
        return self.sharding(None, *spec)


def local_groups(mesh: Mesh) -> list[ModelParallelGroup]:
    """Returns the batch shards that devices of this process belong to, in batch order.

    Raises:
        UserError: if a process would have parts of several groups.
    """
    # The batch axes come first in a mesh, so each row contains the devices of one batch shard.
    rows = mesh.devices.reshape(batch_shards(mesh), -1)
    holders = [{device.process_index for device in devices} for devices in rows]
    # Two processes that share two groups could wait for them in different orders and deadlock.
    shared = [other for one in holders if len(one) > 1 for other in holders if other is not one and one & other]
    if shared:
        sizes = " x ".join(
            f"{a}_axis_size={mesh.shape[a]}" for a in (*MODEL_PARALLEL_AXES, "model") if mesh.shape[a] > 1
        )
        raise UserError(
            f"{sizes} is a group of {rows.shape[1]} devices, which processes of {len(mesh.local_devices)} devices "
            f"cannot hold: make it a divisor or a multiple of that, or start another number of processes"
        )
    groups, local = [], {*local_devices(mesh)}
    for index, devices in enumerate(rows):
        if local.intersection(devices):
            grid = devices.reshape((1,) * len(BATCH_AXES) + mesh.devices.shape[len(BATCH_AXES) :])
            groups.append(ModelParallelGroup(index, Mesh(grid, MESH_AXES, axis_types=mesh.axis_types)))
    return groups


@dataclass(frozen=True)
class PlacedBatch:
    """Rows of a global batch that belong to this process, placed on their devices."""

    plan: MicrobatchPlan
    microbatches: list[list[Batch]]
    """Microbatches of each local group, in order."""
    indices: list[list[jax.Array]]
    """Index of each microbatch in the global batch, an int32 scalar on the devices of its group."""


class DeviceGroups:
    """Groups of devices that compute microbatches. Sends rows and parameters to them.

    Args:
        sharding: shardings of the state.
        microbatches_per_gather: maximum number of microbatches for which a group gathers parameters once; None: all of
            its microbatches. With a smaller number, the batch is divided into several microbatch groups, whose sums are
            added over all devices one after another.
    """

    def __init__(self, sharding: StateSharding, microbatches_per_gather: int | None = None):
        self.sharding, self._microbatches_per_gather = sharding, microbatches_per_gather
        self.groups = local_groups(sharding.mesh)
        self.layers_at_once = LAYERS_AT_ONCE
        """Number of layers in the queue of a device. Arrays take memory once they are queued."""

    def shard_function(self, function: MicrobatchFn, names: Iterable[str]) -> Callable[..., PyTree]:
        """Distributes `function` over the devices of a group; `names` are the parameters in the tree it returns."""
        return shard_over_group(function, self.groups[0].mesh, self.sharding.params, names)

    def divide_microbatches(self, plan: MicrobatchPlan) -> Shares:
        """Divides a microbatch group among all device groups; raises as `MicrobatchPlan.divide_microbatches`."""
        return plan.divide_microbatches(self.sharding.mesh, self._microbatches_per_gather)

    def microbatch_indices(self, plan: MicrobatchPlan) -> list[list[int]]:
        """Returns, for each local group, the indices of its microbatches in the global batch, as computed."""
        shares = self.divide_microbatches(plan)
        firsts = range(0, plan.count, shares.count)
        return [[first + n for first in firsts for n in shares.terms(group.index)] for group in self.groups]

    def local_rows(self, plan: MicrobatchPlan) -> Sequence[int]:
        """Returns the rows of the global batch that this process needs, in order; a range if they are contiguous."""
        every = (n * plan.rows + row for n in self._local_microbatch_indices(plan) for row in range(plan.rows))
        rows = [row for row in every if row < plan.batch_size]
        # With a range, a user's own data source can slice its rows.
        span = range(rows[0], rows[-1] + 1) if rows else range(0)
        return span if len(span) == len(rows) else rows

    def _local_microbatch_indices(self, plan: MicrobatchPlan) -> list[int]:
        """Returns the indices of the microbatches of all local groups, in order."""
        return sorted(number for numbers in self.microbatch_indices(plan) for number in numbers)

    def split(self, batch: Batch, plan: MicrobatchPlan) -> list[list[Batch]]:
        """Splits this process's rows into the microbatches of each local group, in host memory."""
        starts = {number: position * plan.rows for position, number in enumerate(self._local_microbatch_indices(plan))}
        batch = pad_rows(batch, len(starts) * plan.rows)
        return [
            [_slice_rows(batch, starts[number], plan.rows) for number in numbers]
            for numbers in self.microbatch_indices(plan)
        ]

    def put(self, batch: Batch, plan: MicrobatchPlan) -> PlacedBatch:
        """Splits this process's rows into microbatches and sends them to their devices."""
        return self.place(plan, self.split(batch, plan), self.microbatch_indices(plan))

    def place(
        self, plan: MicrobatchPlan, microbatches: Sequence[Sequence[Batch]], indices_by_group: Sequence[Sequence[int]]
    ) -> PlacedBatch:
        """Sends microbatches to their devices.

        Args:
            plan: division of the batch.
            microbatches: microbatches of each local group, in host memory.
            indices_by_group: index of each microbatch in the global batch.
        """
        placed, indices = [], []
        for group, splits, numbers in zip(self.groups, microbatches, indices_by_group, strict=True):
            # All at once, so that later microbatches are transferred while the first is computed. Rows and indices
            # share one transfer; passing a host scalar to a program would cost another transfer for each microbatch.
            rows, group_indices = group.put(([*splits], [np.int32(number) for number in numbers]))
            placed.append(rows)
            indices.append(group_indices)
        return PlacedBatch(plan, placed, indices)

    def group_views(self, arrays: Params) -> list[Params]:
        """Returns, for each local group, global arrays not sharded over the batch axes, as the group reads them."""
        return shards_on_groups(arrays, self.groups)


def same_sharding(one: NamedSharding, other: NamedSharding) -> bool:
    """Returns true if both shardings give every device the same part of an array."""
    return one.is_equivalent_to(other, max(len(one.spec), len(other.spec)))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Pads a batch with rows that belong to no document and have no weight."""
    missing = rows - len(batch.tokens)
    if not missing:
        return batch
    added = jax.tree.map(lambda x: np.zeros((missing, *np.shape(x)[1:]), x.dtype), batch)
    added = added._replace(segments=added.segments - 1)
    return jax.tree.map(lambda x, more: np.concatenate([x, more]), batch, added)


def _slice_rows(batch: Batch, first: int, count: int) -> Batch:
    return jax.tree.map(lambda x: x[first : first + count], batch)


def shards_on_groups(arrays: Params, groups: Sequence[ModelParallelGroup]) -> list[Params]:
    """Returns the parts of global arrays on each group, as arrays of that group.

    The arrays must not be sharded over the batch axes. Their data are not copied.
    """
    by_group: list[Params] = [{} for _ in groups]
    for name, array in arrays.items():
        # Called once for all groups, because it creates an object for every shard.
        shards = shards_by_device(array)
        for params, group in zip(by_group, groups, strict=True):
            params[name] = _shard_on_group(array, shards, group)
    return by_group


def _shard_on_group(array: jax.Array, shards: Mapping[Device, jax.Array], group: ModelParallelGroup) -> jax.Array:
    if group.mesh.size == 1:
        return shards[group.mesh.devices.flat[0]]
    spec = array.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    parts = [shards[device] for device in group.local_devices]
    return join_parts(array.shape, group.sharding(*spec), parts)


def stack_groups(parts: Sequence[jax.Array], spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Joins one array [1, ...] from each local group into the global array [batch shards, ...], without a copy.

    Args:
        parts: arrays in the order of the local groups.
        spec: partition spec of the remaining dimensions.
        mesh: full mesh.
    """
    shape = (batch_shards(mesh), *parts[0].shape[1:])
    if len(parts) == 1 and parts[0].shape == shape and shape[0] > 1:
        # Already global, because it is the result of a program that runs on all devices.
        return parts[0]
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return join_parts(shape, NamedSharding(mesh, PartitionSpec(BATCH_AXES, *spec)), shards)
