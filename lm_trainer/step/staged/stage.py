"""Gathers the parameters of one stage of a loss, and reduces its gradients over the devices.

A stage is the embedding, a layer, the head, or the whole model; see `lm_trainer.step.staged.stage_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.dispatch.device_groups import DeviceGroups, ModelParallelGroup
from lm_trainer.step.dispatch.group_sums import add_over_groups, stack_sums, stacked_shapes, sum_shardings_on_group
from lm_trainer.step.dispatch.mesh_executable import Exchange
from lm_trainer.step.dispatch.mesh_group import MeshGroup, MeshWide
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.read_params import ReadParams, row_shape
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.state.model_def import Params


@dataclass(frozen=True)
class StageLabels:
    """Names, for use in plans, of the programs of a stage and of the arrays that they return."""

    name: str
    """Name of the stage."""
    sums: str
    """Name of the sums over the batch: `gradients`, or `estimates` of curvature."""
    prefix: str = ""
    """Prefix of the programs if there are several stages. Distinguishes a curvature estimate from the gradient."""
    alone: bool = False
    """True if the stage is the only stage of the loss."""

    @property
    def forward(self) -> str:
        """Forward program for a microbatch."""
        return self.name if self.alone else f"{self.prefix}{self.name}"

    @property
    def gradient(self) -> str:
        """Backward program for a microbatch."""
        return self.forward if self.alone else f"{self.forward} gradient"

    @property
    def gradients(self) -> str:
        """Results of the backward program."""
        return self.sums if self.alone else "gradients of a layer"

    @property
    def gather(self) -> str:
        """Program that gathers parameters."""
        return "gather" if self.alone else f"{self.prefix}gather {self.name}"

    @property
    def gathered(self) -> str:
        """Results of `gather`."""
        return "gathered parameters" if self.alone else "gathered layers"

    @property
    def reduce(self) -> str:
        """Program that adds sums over devices."""
        return "reduction" if self.alone else f"{self.prefix}reduce {self.name}"

    @property
    def zeros(self) -> str:
        """Program that allocates the sums of all layers as zeros."""
        return f"{self.prefix}zeros {self.name}"


class StageFunction(NamedTuple):
    """A function of a stage on one microbatch, and the parameters that it reads, which are its first argument."""

    call: Callable[..., PyTree] | None
    """One of `StageFunctions`; None if the stage does not have it."""
    params: ReadParams


class Stage:
    """Parameters that a stage reads: gathers them for computation, and reduces their gradients to storage.

    The programs run on all devices. They only move and cast arrays or add them in a fixed order, so their bits do not
    depend on the devices.

    Args:
        devices: devices that compute the stage.
        functions: functions of the stage. The parameters of layers are stacked along their first axis; a stage uses one
            of these layers.
        shapes: name -> shape of each parameter in storage.
        trainable: names of the parameters that have a gradient.
        labels: names of the programs in plans.
    """

    def __init__(
        self,
        devices: DeviceGroups | MeshWide,
        functions: StageFunctions,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        trainable: Collection[str],
        labels: StageLabels,
    ):
        self.devices, self.functions, self.labels = devices, functions, labels
        self.layered = functions.layers is not None
        params = gradient_params = ReadParams(
            devices, functions.reads, shapes, labels.gather, labels.gathered, layered=self.layered
        )
        if functions.gradient_reads is not None:
            # A program of its own in plans, unless the stage has no forward pass.
            name = labels.gather if functions.forward is None else f"{labels.gather} gradient"
            gradient_params = ReadParams(
                devices, functions.gradient_reads, shapes, name, labels.gathered, layered=False
            )
        self.forward = StageFunction(functions.forward, params)
        self.gradient = StageFunction(functions.gradient, gradient_params)
        self.losses = StageFunction(functions.losses, params)
        self.trained = [name for name in functions.reads if name in trainable]
        self.layouts, self._mesh = params.layouts, devices.sharding.mesh
        self._trained_layouts = {name: self.layouts[name] for name in self.trained}
        self._shapes = {name: shapes[name] for name in self.trained}
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        self._at_rest = {name: params.at_rest[name] for name in self.trained}
        self._stored = {name: params.stored[name] for name in self.trained}
        at_rest = {name: x.sharding for name, x in self._at_rest.items()}
        self._zeros = Program(labels.zeros, jax.jit(self._no_gradients, out_shardings=at_rest), labels.sums)
        # The gradients of all layers are updated in place, one layer at a time.
        reduce_layer = jax.jit(self._into_row, static_argnums=2, out_shardings=at_rest, donate_argnums=0)
        self._reduce_layer = Program(labels.reduce, reduce_layer, labels.sums)
        summed: PyTree = Sums(everywhere, at_rest)  # pyright: ignore[reportArgumentType]
        # With one batch shard, no addition is needed, and the results reuse the memory of the arguments.
        donated = (0,) if batch_shards(self._mesh) == 1 else ()
        reduce = jax.jit(self._over_devices, static_argnums=1, out_shardings=summed, donate_argnums=donated)
        self._reduce = Program(labels.reduce, reduce, labels.sums)

    def reduce_exchange(self, shares: Shares) -> Exchange:
        """Returns `reduce_layer`, `(grads, sums, row)`, for a program that computes meanwhile; see `stack_sums`.

        Args:
            shares: division of the microbatches among the devices.
        """
        shapes = {name: x for name, x in self.gradient.params.shapes().items() if name in self.trained}
        if shares.max_terms > 1:
            # Sums over several microbatches have the dtype of the parameters.
            shapes = {n: jax.ShapeDtypeStruct(x.shape, self._shapes[n].dtype) for n, x in shapes.items()}
        stacked = [stacked_shapes(shapes, self._trained_layouts, self._mesh, ())] * shares.max_parts

        def reduce(grads: Params, sums: list[Sums], row: jax.Array) -> Params:
            return self._into_row(grads, sums, shares, row)

        shardings = {name: x.sharding for name, x in self._at_rest.items()}
        arguments = (self._at_rest, stacked, row_shape(self._mesh))
        return Exchange(self.labels.reduce, reduce, arguments, shardings, self.labels.sums, donated=(0,))

    def reduce(self, sums: list[list[Sums]], shares: Shares) -> Sums:
        """Adds the partial sums of all device groups in all processes. The gradients get the storage sharding.

        Args:
            sums: partial sums of each local group.
            shares: division of the microbatches among the groups.
        """
        return wait_on_cpu(self._reduce(self.stack_sums(sums, shares), shares))

    def zero_gradients(self) -> Params:
        """Returns zeros in the shape of the gradients of all layers."""
        return self._zeros()

    def stack_sums(self, parts: list[list[Sums]], shares: Shares) -> list[Sums]:
        """Returns the partial sums of all devices in the form that `reduce_exchange` takes; see `group_sums`."""
        return stack_sums(parts, shares, self._trained_layouts, self._mesh)

    def reduce_layer(self, grads: Params, sums: list[list[Sums]], shares: Shares, row: jax.Array) -> Params:
        """Same as `reduce`, but writes the result to one layer (`row`) of `grads`, which are consumed."""
        return wait_on_cpu(self._reduce_layer(grads, self.stack_sums(sums, shares), shares, row))

    def sum_shardings_on(self, group: ModelParallelGroup | MeshGroup) -> PyTree:
        """Returns the shardings, on a group, of the sums of a microbatch, which have a leading axis."""
        return sum_shardings_on_group(group, self._trained_layouts)

    def _no_gradients(self) -> Params:
        return {name: jnp.zeros(self._shapes[name].shape, self._shapes[name].dtype) for name in self.trained}

    def _over_devices(self, stacked: list[Sums], shares: Shares) -> Sums:
        dtypes = {name: self._shapes[name].dtype for name in self.trained}
        scalars, sums = add_over_groups(stacked, shares, self.layouts, self._mesh, dtypes)
        return Sums(scalars, {n: jax.lax.with_sharding_constraint(x, self._stored[n]) for n, x in sums.items()})

    def _into_row(self, grads: Params, stacked: list[Sums], shares: Shares, row: jax.Array) -> Params:
        sums = self._over_devices(stacked, shares).tree
        return {name: jax.lax.dynamic_update_index_in_dim(x, sums[name], row, 0) for name, x in grads.items()}
