"""The parameters of one stage of a loss on their way to the devices, and the way of their gradients back.

A stage is the embedding, a layer, the head, or the whole model: see `lm_trainer.step.staged.stage_functions`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.dispatch.device_groups import DeviceGroups, ModelParallelGroup, on_groups, same_sharding
from lm_trainer.step.dispatch.group_sums import add_over_groups, stack_sums, sums_on_group
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.model_def import Params


@dataclass(frozen=True)
class StageLabels:
    """The names that a plan has for the programs of a stage, and for the arrays that they return."""

    name: str
    """The name of the stage."""
    sums: str
    """Sums over the batch: `gradients`, or `estimates` of curvature."""
    prefix: str = ""
    """A prefix of programs of several stages, which tells an estimate from the gradient."""
    alone: bool = False
    """True where the stage is the only one."""

    @property
    def forward(self) -> str:
        """The program of the stage itself, for a microbatch."""
        return self.name if self.alone else f"{self.prefix}{self.name}"

    @property
    def gradient(self) -> str:
        """The program of its derivative."""
        return self.forward if self.alone else f"{self.forward} gradient"

    @property
    def gradients(self) -> str:
        """The results of the derivative for a microbatch."""
        return self.sums if self.alone else "gradients of a layer"

    @property
    def gather(self) -> str:
        """The program that gathers parameters."""
        return "gather" if self.alone else f"{self.prefix}gather {self.name}"

    @property
    def gathered(self) -> str:
        """The results of `gather`."""
        return "gathered parameters" if self.alone else "gathered layers"

    @property
    def reduce(self) -> str:
        """The program that adds sums over devices."""
        return "reduction" if self.alone else f"{self.prefix}reduce {self.name}"

    @property
    def zeros(self) -> str:
        """The program that makes room for the sums of all layers."""
        return f"{self.prefix}zeros {self.name}"


class Stage:
    """The parameters that a stage reads: at rest, where they are computed with, and their gradients.

    Its programs run on all devices. They only move and cast, or add in a fixed order, so that their bits do not depend
    on the devices.

    Args:
        devices: that compute.
        functions: of the stage. Of layers, the first axis of a parameter is that over layers, of which a stage has one.
        shapes: name -> shape of each parameter at rest.
        trainable: the parameters that have a gradient.
        labels: of its programs.
    """

    def __init__(
        self,
        devices: DeviceGroups,
        functions: StageFunctions,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        trainable: Collection[str],
        labels: StageLabels,
    ):
        dtypes, layered = functions.reads, functions.layers is not None
        self.devices, self.functions, self.dtypes, self.layered = devices, functions, dict(dtypes), layered
        self.trained = [name for name in dtypes if name in trainable]
        sharding, self._mesh = devices.sharding, devices.sharding.mesh
        self._rest = {name: sharding.params[name] for name in dtypes}
        self.layouts = {n: _of_one(x) for n, x in self._rest.items()} if layered else self._rest
        self._trained_layouts = {name: self.layouts[name] for name in self.trained}
        self._shapes, self.labels = {name: shapes[name] for name in dtypes}, labels
        self._stored = {name: NamedSharding(self._mesh, self.layouts[name].storage) for name in dtypes}
        everywhere = self._everywhere = NamedSharding(self._mesh, PartitionSpec())
        self._at_rest = {name: NamedSharding(self._mesh, self._rest[name].storage) for name in dtypes}
        computed = {name: NamedSharding(self._mesh, self.layouts[name].compute) for name in dtypes}
        # Axes of a single device cut nothing: there the parameters are where they are needed, and are not copied.
        there = not layered and all(x.dtype == dtypes[name] for name, x in self._shapes.items())
        there = there and all(same_sharding(computed[name], self._at_rest[name]) for name in dtypes)
        self._gather = None
        if not there:
            gather = jax.jit(self._gathered, out_shardings=computed)
            self._gather = Program(labels.gather, gather, labels.gathered, queued=layered)
        at_rest = {name: self._at_rest[name] for name in self.trained}
        self._zeros = Program(labels.zeros, jax.jit(self._no_gradients, out_shardings=at_rest), labels.sums)
        # The gradients of all layers stay where they are, and get another layer.
        reduce_layer = jax.jit(self._into_row, static_argnums=2, out_shardings=at_rest, donate_argnums=0)
        self._reduce_layer = Program(labels.reduce, reduce_layer, labels.sums)
        summed: Any = Sums(everywhere, at_rest)  # pyright: ignore[reportArgumentType]
        # With one shard there is nothing to add, and what comes out lies where it was.
        alone = (0,) if batch_shards(self._mesh) == 1 else ()
        reduce = jax.jit(self._over_devices, static_argnums=1, out_shardings=summed, donate_argnums=alone)
        self._reduce = Program(labels.reduce, reduce, labels.sums)

    def gather(self, params: Params, row: jax.Array) -> list[Params]:
        """The parameters of this stage as each local group computes with them.

        Args:
            params: all of the model.
            row: the layer among those of its place, an int32 scalar on all devices.
        """
        read = {name: params[name] for name in self.dtypes}
        gathered = read if self._gather is None else wait_on_cpu(self._gather(read, row))
        return on_groups(gathered, self.devices.groups)

    def reduce(self, sums: list[list[Sums]], shares: Shares) -> Sums:
        """Adds the partial sums of the local groups and of those of other processes, of which there are `shares`.

        The gradients lie as their parameters.
        """
        return wait_on_cpu(self._reduce(self._stack(sums, shares), shares))

    def no_gradients(self) -> Params:
        """Zeros in the place of the gradients of all layers."""
        return self._zeros()

    def reduce_layer(self, grads: Params, sums: list[list[Sums]], shares: Shares, row: jax.Array) -> Params:
        """As `reduce`, into the row of one layer of `grads`, which are consumed."""
        return wait_on_cpu(self._reduce_layer(grads, self._stack(sums, shares), shares, row))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the gathered parameters."""
        return {name: jax.ShapeDtypeStruct(self._shape(name), dtype) for name, dtype in self.dtypes.items()}

    def on(self, group: ModelParallelGroup) -> dict[str, jax.ShapeDtypeStruct]:
        """`shapes` with their shardings on a group."""
        lies = {name: group.sharding(*self.layouts[name].compute) for name in self.dtypes}
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies[n]) for n, x in self.shapes().items()}

    def sums_on(self, group: ModelParallelGroup) -> Any:
        """The shardings of a microbatch's sums, with an axis in front, on a group."""
        return sums_on_group(group, self._trained_layouts)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes[name].shape
        return shape[1:] if self.layered else shape

    def _gathered(self, params: Params, row: jax.Array) -> Params:
        if self.layered:
            params = {n: jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False) for n, x in params.items()}
        # Cast where they rest, so that the narrower values travel.
        cast = {name: x.astype(self.dtypes[name]) for name, x in params.items()}
        return {name: jax.lax.with_sharding_constraint(x, self._stored[name]) for name, x in cast.items()}

    def _no_gradients(self) -> Params:
        return {name: jnp.zeros(self._shapes[name].shape, self._shapes[name].dtype) for name in self.trained}

    def _over_devices(self, stacked: list[Sums], shares: Shares) -> Sums:
        dtypes = {name: self._shapes[name].dtype for name in self.trained}
        scalars, sums = add_over_groups(stacked, shares, self.layouts, self._mesh, dtypes)
        return Sums(scalars, {n: jax.lax.with_sharding_constraint(x, self._stored[n]) for n, x in sums.items()})

    def _into_row(self, grads: Params, stacked: list[Sums], shares: Shares, row: jax.Array) -> Params:
        sums = self._over_devices(stacked, shares).tree
        return {name: jax.lax.dynamic_update_index_in_dim(x, sums[name], row, 0) for name, x in grads.items()}

    def _stack(self, parts: list[list[Sums]], shares: Shares) -> list[Sums]:
        return stack_sums(parts, shares, self._trained_layouts, self._mesh)


def _of_one(sharding: ParamSharding) -> ParamSharding:
    """The sharding of one layer of a parameter whose layers are stacked."""
    dim = sharding.scatter_dim
    return replace(
        sharding,
        storage=PartitionSpec(*sharding.storage[1:]),
        compute=PartitionSpec(*sharding.compute[1:]),
        # Where the axis over layers was to be cut, a layer is added up as a vector.
        scatter_dim=dim - 1 if dim else None,
        norm_grid=sharding.norm_grid[1:],
    )
