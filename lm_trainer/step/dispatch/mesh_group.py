"""All devices of a mesh as one group: each device computes its own microbatch, by the same program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.rehearsal import put_abstract
from lm_trainer.parallel.sharded_array import replicate, shards_by_device
from lm_trainer.parallel.tree_sum import Shares, TreeSum
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.state.model_def import Params

T = TypeVar("T")

Role = Literal["own", "shared"]
"""`own` if each device has its own value of an argument, `shared` if all devices have the same value."""


class Signature(NamedTuple):
    """Arguments and results of a function of one microbatch, whose first argument is the parameters."""

    arguments: Sequence[PyTree]
    """Shapes of the other arguments on one device or group."""
    roles: Sequence[Role]
    """Role of each of the other arguments."""
    returns: PyTree
    """Same as for `lm_trainer.step.staged.stage_sharing.share_stage`."""
    donated: Sequence[int] = ()
    """Positions of the arguments that the function consumes; the parameters are argument 0."""


@dataclass(frozen=True)
class MeshGroup:
    """Group of all devices of a mesh.

    Values that differ between devices are concatenated along their first axis into one global array, or into a vector
    if they are scalars. The part on a device therefore has the same shape as in a program for one device, and the
    program has the same operations.
    """

    mesh: Mesh
    index: ClassVar[int] = 0

    def sharding(self, *spec: str | tuple[str, ...] | None) -> NamedSharding:
        """Returns a sharding for a value that is the same for all batch shards."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def stacked_sharding(self, *spec: str | tuple[str, ...] | None) -> NamedSharding:
        """Returns a sharding for the values of all batch shards, concatenated along the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES, *spec))

    def put(self, values: PyTree) -> PyTree:
        """Puts host scalars on all devices."""
        return jax.tree.map(lambda x: replicate(x, self.mesh), values)

    def microbatch_positions(self, shares: Shares) -> range:
        """Returns the positions of a device's microbatches among its own microbatches."""
        return range(shares.max_terms)

    def make_tree_sum(self, shares: Shares, add: Callable[[T, T], T]) -> TreeSum[T]:
        """Makes the sum over the microbatches of a device, the same subtree of the full sum on every device.

        The shares must be even.
        """
        return TreeSum(shares.max_terms, add)

    def argument_shapes(self, signature: Signature) -> tuple[PyTree, ...]:
        """Returns the global shapes and shardings of the arguments of a function."""
        shards = batch_shards(self.mesh)

        def replicated_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding())

        def concatenated_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            rows, *row_shape = x.shape or (1,)
            return jax.ShapeDtypeStruct((shards * rows, *row_shape), x.dtype, sharding=self.stacked_sharding())

        by_role = {"shared": replicated_shape, "own": concatenated_shape}
        pairs = zip(signature.arguments, signature.roles, strict=True)
        return tuple(jax.tree.map(by_role[role], argument) for argument, role in pairs)

    def map_over_devices(self, function: Callable[..., PyTree], signature: Signature) -> Callable[..., PyTree]:
        """Maps `function(params, *arguments)`, which computes on one device, over all devices."""

        def on_device(params: Params, *values: PyTree) -> PyTree:
            arguments = jax.tree.map(lambda about, x: x.reshape(about.shape), tuple(signature.arguments), values)
            return jax.tree.map(lambda x: x.reshape(x.shape or (1,)), function(params, *arguments))

        specs = {"own": PartitionSpec(BATCH_AXES), "shared": PartitionSpec()}
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), *(specs[role] for role in signature.roles)),
            out_specs=PartitionSpec(BATCH_AXES),
            check_vma=False,
        )


class MeshWide:
    """Places batches and parameters for programs that run on all devices of a mesh; otherwise like `DeviceGroups`.

    Args:
        devices: the same devices as separate groups of one device each.
    """

    def __init__(self, devices: DeviceGroups):
        self.devices, self.sharding = devices, devices.sharding
        self.groups = [MeshGroup(devices.sharding.mesh)]

    @property
    def layers_at_once(self) -> int:
        """Same as `DeviceGroups.layers_at_once`."""
        return self.devices.layers_at_once

    def divide_microbatches(self, plan: MicrobatchPlan) -> Shares:
        """Same as `DeviceGroups.divide_microbatches`."""
        return self.devices.divide_microbatches(plan)

    def put(self, batch: Batch, plan: MicrobatchPlan) -> PlacedBatch:
        """Puts this process's rows on their devices, with one global array for the n-th microbatches of all devices.

        If devices have different numbers of microbatches, a device with fewer repeats its last one (`split_results`).
        """
        shares = self.divide_microbatches(plan)
        fill = partial(_fill_groups, num_groups=plan.count // shares.count, size=shares.max_terms)
        return self.place(plan, fill(self.devices.split(batch, plan)), fill(self.devices.microbatch_indices(plan)))

    def place(
        self, plan: MicrobatchPlan, microbatches: Sequence[Sequence[Batch]], indices_by_group: Sequence[Sequence[int]]
    ) -> PlacedBatch:
        """Same as `DeviceGroups.place`, for the microbatches of each local device."""
        (group,) = self.groups

        def join(*parts: np.ndarray | np.generic) -> jax.Array:
            values = np.concatenate([np.atleast_1d(part) for part in parts])
            shape = (batch_shards(group.mesh) * (len(values) // len(parts)), *values.shape[1:])
            if (
                rehearsed := put_abstract(np.broadcast_to(values[:1], shape), group.stacked_sharding(), "batch")
            ) is not None:
                return rehearsed
            return jax.make_array_from_process_local_data(group.stacked_sharding(), values, shape)

        by_microbatch = zip(*microbatches, strict=True)
        rows = [jax.tree.map(join, *of_devices) for of_devices in by_microbatch]
        numbers = zip(*indices_by_group, strict=True)
        indices = [join(*map(np.int32, of_devices)) for of_devices in numbers]
        return PlacedBatch(plan, [rows], [indices])

    def group_views(self, arrays: Params) -> list[Params]:
        """Returns gathered parameters in the form in which the group reads them: global arrays."""
        return [arrays]

    def split_results(self, results: PyTree, position: int, shares: Shares) -> list[PyTree]:
        """Splits results of a program into the results of each local device, without copies and without repetitions.

        Args:
            results: results for one microbatch of each device.
            position: position of the microbatch among the microbatches of a device.
            shares: division of the microbatches among the devices.
        """
        leaves, structure = jax.tree.flatten(results)
        parts = [shards_by_device(leaf) for leaf in leaves]
        devices = [
            group.mesh.devices.flat[0] for group in self.devices.groups if position < len(shares.terms(group.index))
        ]
        return [structure.unflatten([of_device[device] for of_device in parts]) for device in devices]


def _fill_groups(by_device: Sequence[Sequence[T]], num_groups: int, size: int) -> list[list[T]]:
    """Returns the items of each device in groups of `size` items, where the last item of a group is repeated."""

    def fill(items: Sequence[T]) -> list[T]:
        count = len(items) // num_groups
        return [items[first + min(n, count - 1)] for first in range(0, len(items), count) for n in range(size)]

    return [fill(items) for items in by_device]


def can_be_mesh_wide(devices: DeviceGroups) -> bool:
    """Returns true if one program for all devices is faster, and possible: if each device computes microbatches alone.

    Devices that share a microbatch exchange values inside the computation. These exchanges name the devices, so a
    program for all devices and the program of one group have different graphs.
    """
    mesh = devices.sharding.mesh
    return prefers_mesh_wide(mesh.devices.flat[0].platform) and mesh.size == batch_shards(mesh) > 1


_DISPATCHES_FOR: ContextVar[str | None] = ContextVar("dispatches_for", default=None)


@contextmanager
def dispatching_for(platform: str) -> Iterator[None]:
    """Makes steps built in this context dispatch programs as on devices of this platform; for plans and tests."""
    token = _DISPATCHES_FOR.set(platform)
    try:
        yield
    finally:
        _DISPATCHES_FOR.reset(token)


def prefers_mesh_wide(platform: str) -> bool:
    """Returns true if one program for all devices is faster than one program for each device.

    On CPUs it is not: programs of single devices overlap, and dispatching is cheap compared to computing.
    """
    return (_DISPATCHES_FOR.get() or platform) != "cpu"
