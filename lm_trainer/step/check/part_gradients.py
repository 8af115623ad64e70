"""Gradients of parts of a batch: of microbatches in which only the targets of the part have a weight.

The executables of the step compute them, with the same dropout, on any number of devices.

Shape letters: S is the number of batch shards in one array.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.step.check.recompute import HostMicrobatch
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.mesh_group import MeshWide
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.microbatches import Microbatch
from lm_trainer.step.loss.gradient import STEP_SCALARS, Sums
from lm_trainer.step.staged.staged_sum import StagedSum
from lm_trainer.step.staged.stages import PreparedParams
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.updates.split import split_params


class PartSums(NamedTuple):
    """Sums over the targets of a part of a batch."""

    loss: float
    """Sum of the weighted losses."""
    weight: float
    """Sum of the weights."""
    squares: float
    """Sum of the squares of the gradient of the summed loss."""


class PartGradients:
    """Computes the gradients of parts of a batch, one microbatch on each batch shard at a time.

    Only a run in a single process can use it.

    Args:
        gradient: computes the gradients of microbatches.
        devices: devices that compute microbatches.
        params: all parameters, prepared by `gradient`.
        rows: number of rows in a microbatch.
        step: number of completed steps.
        measured: names of the parameters whose gradients are measurements, which do not count.
    """

    def __init__(
        self,
        gradient: StagedSum,
        devices: DeviceGroups | MeshWide,
        params: PreparedParams,
        rows: int,
        step: int,
        measured: Collection[str],
    ):
        self._gradient, self._devices, self._params, self._step = gradient, devices, params, step
        self._measured = measured
        shards = batch_shards(devices.sharding.mesh)
        self._plan = MicrobatchPlan(rows * shards, shards, rows)

    def compute(self, microbatches: Sequence[HostMicrobatch]) -> list[PartSums]:
        """Computes the sums of each microbatch. Rows have weights only where their targets are in the part."""
        results, shards = [], self._plan.count
        for first in range(0, len(microbatches), shards):
            chunk = microbatches[first : first + shards]
            results += self._compute_together([*chunk, *[chunk[-1]] * (shards - len(chunk))])[: len(chunk)]
        return results

    def _compute_together(self, microbatches: Sequence[HostMicrobatch]) -> list[PartSums]:
        wide = isinstance(self._devices, MeshWide)
        groups = (self._devices.devices if isinstance(self._devices, MeshWide) else self._devices).groups
        chosen = [microbatches[group.index] for group in groups]
        placed = self._devices.place(self._plan, [[m.rows] for m in chosen], [[m.index] for m in chosen])
        tap = _SquaresTap(self._measured)
        self._gradient.compute_only(self._params, placed, self._step, tap)
        by_group = tap.read()
        return by_group[0] if wide else [sums for group in sorted(by_group) for sums in by_group[group]]


class _SquaresTap:
    """Receives the sums of microbatches stage by stage, and adds up the squares of their gradients."""

    def __init__(self, measured: Collection[str]):
        self._measured = measured
        self._last_stages: dict[int, Params] = {}
        self._squares: dict[int, list[jax.Array]] = {}
        self._scalars: dict[int, dict[str, jax.Array]] = {}

    def __call__(self, group: int, microbatch: Microbatch, sums: Sums) -> None:
        """Receives the sums of one stage of a microbatch, which local group number `group` has computed."""
        del microbatch
        grads, _ = split_params(sums.tree, self._measured)
        # Two stages may read a parameter, the embedding and the head: the square of its gradient includes a product.
        # The last stage comes first.
        last_stage = self._last_stages.setdefault(group, grads)
        twice = {name: last_stage[name] for name in grads if name in last_stage and last_stage is not grads}
        if grads:
            self._squares.setdefault(group, []).append(wait_on_cpu(_squares(grads, twice)))
        if sums.scalars:
            self._scalars.setdefault(group, sums.scalars)

    def read(self) -> dict[int, list[PartSums]]:
        """Waits for the sums, and returns the sums of each batch shard, by local group."""
        results = {}
        for group, scalars in self._scalars.items():
            squares_S = np.sum([np.asarray(part, np.float64) for part in self._squares[group]], axis=0)
            loss_S, weight_S = (np.asarray(scalars[name], np.float64).reshape(-1) for name in STEP_SCALARS)
            results[group] = [PartSums(*map(float, sums)) for sums in zip(loss_S, weight_S, squares_S, strict=True)]
        return results


@jax.jit
def _squares(grads: Params, twice: Params) -> jax.Array:
    """Returns the sum of the squares of gradients [S, ...] for each batch shard, and of their products with others.

    Args:
        grads: gradients of one stage.
        twice: gradients of another stage for some of the same parameters.
    """
    total = partial(jnp.sum, dtype=jnp.float32)
    parts = [total(jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim))) for x in grads.values()]
    products = [
        2.0 * total(x.astype(jnp.float32) * grads[name].astype(jnp.float32), axis=tuple(range(1, x.ndim)))
        for name, x in twice.items()
    ]
    return sum(products, start=sum(parts[1:], start=parts[0]))
