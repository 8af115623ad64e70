"""Microbatches that the devices of this process compute together, and values computed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.mesh_group import MeshWide

T = TypeVar("T")
R = TypeVar("R")


class Microbatch(NamedTuple):
    """One microbatch and the device group that computes it."""

    group: int
    """Index of the device group among the groups of this process."""
    rows: Batch
    step: jax.Array
    """Number of the step, an int32 scalar."""
    index: jax.Array
    """Index of the microbatch in the global batch, an int32 scalar."""


@dataclass(frozen=True)
class Microbatches(Generic[T]):
    """Values for several microbatches, in order, for each device group of this process."""

    by_group: list[list[T]]

    def map(self, function: Callable[..., R], *others: Microbatches[PyTree]) -> Microbatches[R]:
        """Calls `function(value, *values of others)` for each microbatch."""
        results: list[list[R]] = [[] for _ in self.by_group]
        # Alternates between the groups, so that all devices have work while the host dispatches.
        for j in range(max(map(len, self.by_group))):
            for i, values in enumerate(self.by_group):
                if j < len(values):
                    results[i].append(function(values[j], *(other.by_group[i][j] for other in others)))
        return Microbatches(results)

    def last_values(self) -> list[T]:
        """Returns the last value of each device group."""
        return [values[-1] for values in self.by_group]

    def __iter__(self) -> Iterator[T]:
        return (value for values in self.by_group for value in values)


@dataclass(frozen=True)
class MicrobatchGroup:
    """Microbatches that share gathered parameters."""

    shares: Shares
    """Division of the microbatches among all device groups."""
    microbatches: Microbatches[Microbatch]


def microbatch_groups(batch: PlacedBatch, devices: DeviceGroups | MeshWide, step: int) -> Iterator[MicrobatchGroup]:
    """Yields the microbatches of a batch in groups that share gathered parameters, in order of computation."""
    shares = devices.divide_microbatches(batch.plan)
    steps = [group.put(np.int32(step)) for group in devices.groups]
    sizes = [len(group.microbatch_positions(shares)) for group in devices.groups]
    for number in range(batch.plan.count // shares.count):
        slices = [slice(number * size, (number + 1) * size) for size in sizes]
        yield MicrobatchGroup(
            shares,
            Microbatches(
                [
                    [
                        Microbatch(i, rows, steps[i], index)
                        for rows, index in zip(of_rows[part], of_indices[part], strict=True)
                    ]
                    for i, (part, of_rows, of_indices) in enumerate(
                        zip(slices, batch.microbatches, batch.indices, strict=True)
                    )
                ]
            ),
        )
