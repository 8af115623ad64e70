"""Computes microbatches of a batch again, each on another group of devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.processes import gather, gather_texts
from lm_trainer.step.check.digests import DigestTap, read_on_host
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.mesh_group import MeshWide
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.staged_sum import StagedSum
from lm_trainer.step.staged.stages import PreparedParams


class HostMicrobatch(NamedTuple):
    """A microbatch in host memory."""

    rows: Batch
    index: int
    """Index in the global batch."""


def shared_digests(local: Mapping[int, str]) -> dict[int, str]:
    """Returns the digests of all processes by batch shard. All processes must call this function."""
    every = [json.loads(text) for text in gather_texts(json.dumps(dict(local)))]
    return {int(shard): digest for digests in every for shard, digest in digests.items()}


def positions_of_groups(batch: PlacedBatch, position: int) -> list[int]:
    """Returns the position of a microbatch in the list of each local group. Groups may have fewer microbatches."""
    return [position % len(microbatches) for microbatches in batch.microbatches]


def microbatch_indices(batch: PlacedBatch, positions: Sequence[int]) -> list[jax.Array]:
    """Returns the arrays that identify the microbatches at these positions in the list of each local group."""
    return [indices[j] for indices, j in zip(batch.indices, positions, strict=True)]


class Recomputation:
    """Computes one microbatch of each batch shard again, on the devices of another batch shard.

    Args:
        gradient: computes the gradients. The same executables are used.
        devices: devices that compute microbatches.
        params: all parameters, prepared by `gradient`.
        batch: the batch of the step.
        positions: from `positions_of_groups`.
        step: number of the step.
    """

    def __init__(
        self,
        gradient: StagedSum,
        devices: DeviceGroups | MeshWide,
        params: PreparedParams,
        batch: PlacedBatch,
        positions: Sequence[int],
        step: int,
    ):
        self._gradient, self._devices, self._params, self._step = gradient, devices, params, step
        self._groups = (devices.devices if isinstance(devices, MeshWide) else devices).groups
        self.shards = batch_shards(devices.sharding.mesh)
        rows = batch.plan.rows
        # One microbatch for each group, of the same shape as in the step.
        self._plan = MicrobatchPlan(rows * self.shards, self.shards, rows)
        self.microbatches = self._share(self._read(batch, positions))
        """The chosen microbatch of each batch shard."""

    def compute_step(self, batch: PlacedBatch, positions: Sequence[int]) -> tuple[Sums, dict[int, str]]:
        """Computes the sums of the step, and returns them with the digests of the chosen microbatches."""
        tap = DigestTap(self._devices, microbatch_indices(batch, positions))
        sums = self._gradient(self._params, batch, self._step, tap)
        return sums, shared_digests(tap.read())

    def compute_elsewhere(self, source: Callable[[int], int]) -> dict[int, str]:
        """Makes batch shard s compute the chosen microbatch of batch shard `source(s)`.

        Returns:
            The digest that each batch shard computed.
        """
        chosen = [self.microbatches[source(group.index)] for group in self._groups]
        placed = self._devices.place(self._plan, [[m.rows] for m in chosen], [[m.index] for m in chosen])
        tap = DigestTap(self._devices, [index for indices in placed.indices for index in indices])
        self._gradient.compute_only(self._params, placed, self._step, tap)
        return shared_digests(tap.read())

    def _read(self, batch: PlacedBatch, positions: Sequence[int]) -> dict[int, HostMicrobatch]:
        wide = isinstance(self._devices, MeshWide)
        local = {}
        for i, group in enumerate(self._groups):
            listed = 0 if wide else i
            placed = batch.microbatches[listed][positions[listed]], batch.indices[listed][positions[listed]]
            rows, index = read_on_host(placed, group.local_devices[0])
            local[group.index] = HostMicrobatch(rows, int(np.ravel(index)[0]))
        return local

    def _share(self, local: Mapping[int, HostMicrobatch]) -> dict[int, HostMicrobatch]:
        """Returns the microbatches of all processes. All processes must have equally many groups."""
        if jax.process_count() == 1:
            return dict(local)
        shards, microbatches = [*local], [*local.values()]
        numbers = gather(np.array([shards, [m.index for m in microbatches]], np.int32))
        rows = jax.tree.map(lambda *parts: gather(np.stack(parts)), *(m.rows for m in microbatches))
        return {
            int(numbers[process, 0, i]): HostMicrobatch(
                jax.tree.map(lambda x, at=(process, i): x[at], rows), int(numbers[process, 1, i])
            )
            for process in range(len(numbers))
            for i in range(len(shards))
        }
