"""Groups of devices that compute one microbatch together, and the way of rows and parameters to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import BATCH_AXES, MESH_AXES, MODEL_PARALLEL_AXES, batch_shards
from lm_trainer.parallel.rehearsal import join_parts, local_devices, put_on
from lm_trainer.parallel.sharded_array import by_device
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.model_parallel import shard_over_group
from lm_trainer.step.loss.gradient import MicrobatchFn
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import StateSharding


@dataclass(frozen=True)
class ModelParallelGroup:
    """The devices that compute one microbatch together: those along the axes that are not batch axes."""

    index: int
    """Position among all batch shards of the mesh."""
    mesh: Mesh
    """The same axes as the whole mesh, with the batch axes of size 1."""

    def sharding(self, *spec: Any) -> NamedSharding:
        """A sharding over this group's devices."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @cached_property
    def local_devices(self) -> list[Any]:
        """Those of its devices that belong to this process."""
        return [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]

    @property
    def is_lead(self) -> bool:
        """True in one of the processes whose devices it has."""
        return self.mesh.devices.flat[0].process_index == jax.process_index()

    def put(self, values: Any) -> Any:
        """Arrays of the host, whole on each device of the group; all of its processes have the same ones."""
        if (rehearsed := put_on(values, self.sharding(), "batch")) is not None:
            return rehearsed
        if len(self.local_devices) == self.mesh.size:
            return jax.device_put(values, self.sharding())
        # `device_put` would compare the values over all processes of the run.
        copies = [jax.device_put(values, device) for device in self.local_devices]

        def join(*parts: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(parts[0].shape, self.sharding(), parts)

        return jax.tree.map(join, *copies)


def local_groups(mesh: Mesh) -> list[ModelParallelGroup]:
    """The batch shards that devices of this process belong to, in the order of the batch.

    Raises:
        UserError: when a process would have a part of one group and a part of another.
    """
    # The batch axes come first in a mesh, so that each row holds the devices of one batch shard.
    rows = mesh.devices.reshape(batch_shards(mesh), -1)
    holders = [{device.process_index for device in devices} for devices in rows]
    # Two groups that wait for one another in two processes, in another order in each, would wait for ever.
    shared = [other for one in holders if len(one) > 1 for other in holders if other is not one and one & other]
    if shared:
        sizes = " x ".join(
            f"{a}_axis_size={mesh.shape[a]}" for a in (*MODEL_PARALLEL_AXES, "model") if mesh.shape[a] > 1
        )
        raise UserError(
            f"{sizes} is a group of {rows.shape[1]} devices, which processes of {len(mesh.local_devices)} devices "
            f"cannot hold: make it a divisor or a multiple of that, or start another number of processes"
        )
    groups, own = [], {*local_devices(mesh)}
    for index, devices in enumerate(rows):
        if own.intersection(devices):
            grid = devices.reshape((1,) * len(BATCH_AXES) + mesh.devices.shape[len(BATCH_AXES) :])
            groups.append(ModelParallelGroup(index, Mesh(grid, MESH_AXES, axis_types=mesh.axis_types)))
    return groups


@dataclass(frozen=True)
class PlacedBatch:
    """This process's rows of a global batch, on their devices."""

    plan: MicrobatchPlan
    microbatches: list[list[Batch]]
    """For each local group its microbatches, in order."""
    indices: list[list[jax.Array]]
    """The number of each of them among those of the global batch, an int32 scalar on its group."""


class DeviceGroups:
    """The groups of devices that compute microbatches, and the way of rows and parameters to them.

    Args:
        sharding: of the state.
        together: the most microbatches of a group that are neighbours in the batch; None: all of them. With fewer, a
            group computes some after others, and the sums of these are added over all groups before the next.
    """

    def __init__(self, sharding: StateSharding, together: int | None = None):
        self.sharding, self._together = sharding, together
        self.groups = local_groups(sharding.mesh)

    def cut(self, function: MicrobatchFn, names: Iterable[str]) -> Callable[..., Any]:
        """`function` as the devices of a group share it; `names` are the parameters that its tree has."""
        return shard_over_group(function, self.groups[0].mesh, self.sharding.params, names)

    def shares(self, plan: MicrobatchPlan) -> Shares:
        """The division of the microbatches of a turn among all groups; raises as `MicrobatchPlan.shares`."""
        return plan.shares(self.sharding.mesh, self._together)

    def numbers(self, plan: MicrobatchPlan) -> list[list[int]]:
        """For each local group, the numbers of its microbatches in the global batch, in the order of computation."""
        shares = self.shares(plan)
        firsts = range(0, plan.count, shares.count)
        return [[first + n for first in firsts for n in shares.terms(group.index)] for group in self.groups]

    def local_rows(self, plan: MicrobatchPlan) -> Sequence[int]:
        """The rows of the global batch that this process needs, in order; a range where they are neighbours."""
        every = (n * plan.rows + row for n in self._local(plan) for row in range(plan.rows))
        rows = [row for row in every if row < plan.batch_size]
        # Data of one's own may take a slice of them.
        whole = range(rows[0], rows[-1] + 1) if rows else range(0)
        return whole if len(whole) == len(rows) else rows

    def _local(self, plan: MicrobatchPlan) -> list[int]:
        """The numbers of the microbatches of all local groups, in order."""
        return sorted(number for numbers in self.numbers(plan) for number in numbers)

    def put(self, batch: Batch, plan: MicrobatchPlan) -> PlacedBatch:
        """Cuts this process's rows and sends them to their devices."""
        starts = {number: place * plan.rows for place, number in enumerate(self._local(plan))}
        batch = pad_rows(batch, len(starts) * plan.rows)
        placed, indices = [], []
        for group, numbers in zip(self.groups, self.numbers(plan), strict=True):
            cuts = [_rows(batch, starts[number], plan.rows) for number in numbers]
            # All at once: later microbatches are on their way while the first is computed.
            # One transfer for both; a scalar given to a program from the host would be another for each microbatch.
            rows, at = group.put((cuts, [np.int32(number) for number in numbers]))
            placed.append(rows)
            indices.append(at)
        return PlacedBatch(plan, placed, indices)


def compute_shardings(sharding: StateSharding) -> dict[str, NamedSharding] | None:
    """The shardings of all parameters during computation; None where they rest so, and nothing is gathered."""
    compute = {name: NamedSharding(sharding.mesh, each.compute) for name, each in sharding.params.items()}
    there = all(same_sharding(compute[name], storage) for name, storage in sharding.storage.items())
    return None if there else compute


def same_sharding(one: NamedSharding, other: NamedSharding) -> bool:
    """Tells whether every device has the same part of an array by both."""
    return one.is_equivalent_to(other, max(len(one.spec), len(other.spec)))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Fills up with rows that are no part of any document and have no weight."""
    missing = rows - len(batch.tokens)
    if not missing:
        return batch
    added = jax.tree.map(lambda x: np.zeros((missing, *np.shape(x)[1:]), x.dtype), batch)
    added = added._replace(segments=added.segments - 1)
    return jax.tree.map(lambda x, more: np.concatenate([x, more]), batch, added)


def _rows(batch: Batch, first: int, count: int) -> Batch:
    return jax.tree.map(lambda x: x[first : first + count], batch)


def on_groups(arrays: Params, groups: Sequence[ModelParallelGroup]) -> list[Params]:
    """The parts of global arrays that lie on each group, as arrays of that group.

    The arrays must not be cut over the batch axes; their data are not copied.
    """
    found: list[Params] = [{} for _ in groups]
    for name, array in arrays.items():
        # Asked for once for all groups: it makes an object of every shard.
        shards = by_device(array)
        for here, group in zip(found, groups, strict=True):
            here[name] = _on_group(array, shards, group)
    return found


def _on_group(array: jax.Array, shards: Mapping[Any, jax.Array], group: ModelParallelGroup) -> jax.Array:
    if group.mesh.size == 1:
        return shards[group.mesh.devices.flat[0]]
    spec = array.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    parts = [shards[device] for device in group.local_devices]
    return join_parts(array.shape, group.sharding(*spec), parts)


def stack_groups(parts: Sequence[jax.Array], spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """One array [1, ...] from each local group becomes the global array [batch shards, ...], without a copy.

    Args:
        parts: in the order of the local groups.
        spec: how the remaining dimensions are cut.
        mesh: the whole mesh.
    """
    shape = (batch_shards(mesh), *parts[0].shape[1:])
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return join_parts(shape, NamedSharding(mesh, PartitionSpec(BATCH_AXES, *spec)), shards)
