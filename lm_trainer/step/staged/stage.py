"""Gathers the parameters of one stage of a loss, and reduces its gradients over the devices.

A stage is the embedding, a layer, the head, or the whole model; see `lm_trainer.step.staged.stage_functions`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.dispatch.device_groups import DeviceGroups, ModelParallelGroup, same_sharding
from lm_trainer.step.dispatch.group_sums import add_over_groups, stack_sums, stacked_shapes, sum_shardings_on_group
from lm_trainer.step.dispatch.mesh_executable import Exchange
from lm_trainer.step.dispatch.mesh_group import MeshGroup, MeshWide
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.loss.gradient import Sums
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
        dtypes, layered = functions.reads, functions.layers is not None
        self.devices, self.functions, self.dtypes, self.layered = devices, functions, dict(dtypes), layered
        self.trained = [name for name in dtypes if name in trainable]
        sharding, self._mesh = devices.sharding, devices.sharding.mesh
        stored = {name: sharding.params[name] for name in dtypes}
        self.layouts = {n: _layer_sharding(x) for n, x in stored.items()} if layered else stored
        self._trained_layouts = {name: self.layouts[name] for name in self.trained}
        self._shapes, self.labels = {name: shapes[name] for name in dtypes}, labels
        self._stored = {name: NamedSharding(self._mesh, self.layouts[name].storage) for name in dtypes}
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        storage = {name: NamedSharding(self._mesh, stored[name].storage) for name in dtypes}
        computed = {name: NamedSharding(self._mesh, self.layouts[name].compute) for name in dtypes}
        self._at_rest = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=storage[name]) for name, x in self._shapes.items()
        }
        # If these axes have size 1, storage and compute shardings agree, and no copy is made.
        in_place = not layered and all(x.dtype == dtypes[name] for name, x in self._shapes.items())
        in_place = in_place and all(same_sharding(computed[name], storage[name]) for name in dtypes)
        self._gather = None
        if not in_place:
            gather = jax.jit(self._gathered, out_shardings=computed)
            self._gather = Program(labels.gather, gather, labels.gathered, queued=layered)
        at_rest = {name: storage[name] for name in self.trained}
        self._zeros = Program(labels.zeros, jax.jit(self._no_gradients, out_shardings=at_rest), labels.sums)
        # The gradients of all layers are updated in place, one layer at a time.
        reduce_layer = jax.jit(self._into_row, static_argnums=2, out_shardings=at_rest, donate_argnums=0)
        self._reduce_layer = Program(labels.reduce, reduce_layer, labels.sums)
        summed: PyTree = Sums(everywhere, at_rest)  # pyright: ignore[reportArgumentType]
        # With one batch shard, no addition is needed, and the results reuse the memory of the arguments.
        donated = (0,) if batch_shards(self._mesh) == 1 else ()
        reduce = jax.jit(self._over_devices, static_argnums=1, out_shardings=summed, donate_argnums=donated)
        self._reduce = Program(labels.reduce, reduce, labels.sums)

    def gather(self, params: Params, row: jax.Array) -> list[Params]:
        """Returns the parameters of this stage, gathered for computation on each local group.

        Args:
            params: all parameters of the model.
            row: index of the layer in the stacked parameters, an int32 scalar on all devices.
        """
        read = self.select_params(params)
        gathered = read if self._gather is None else wait_on_cpu(self._gather(read, row))
        return self.devices.group_views(gathered)

    def gather_exchange(self) -> Exchange:
        """Returns `gather` of a layer, `(params, row)`, for a program that computes meanwhile; see `select_params`."""
        computed = {name: NamedSharding(self._mesh, self.layouts[name].compute) for name in self.dtypes}
        arguments = (self._at_rest, _row_shape(self._mesh))
        return Exchange(self.labels.gather, self._gathered, arguments, computed, self.labels.gathered)

    def reduce_exchange(self, shares: Shares) -> Exchange:
        """Returns `reduce_layer`, `(grads, sums, row)`, for a program that computes meanwhile; see
        `stack_for_exchange`.

        Args:
            shares: division of the microbatches among the devices.
        """
        shapes = {name: x for name, x in self.shapes().items() if name in self.trained}
        if shares.max_terms > 1:
            # Sums over several microbatches have the dtype of the parameters.
            shapes = {n: jax.ShapeDtypeStruct(x.shape, self._shapes[n].dtype) for n, x in shapes.items()}
        stacked = stacked_shapes(shapes, self._trained_layouts, self._mesh, ())

        def reduce(grads: Params, sums: Sums, row: jax.Array) -> Params:
            return self._into_row(grads, [sums], shares, row)

        grads = {name: self._at_rest[name] for name in self.trained}
        shardings = {name: x.sharding for name, x in grads.items()}
        arguments = (grads, stacked, _row_shape(self._mesh))
        return Exchange(self.labels.reduce, reduce, arguments, shardings, self.labels.sums, donated=(0,))

    def reduce(self, sums: list[list[Sums]], shares: Shares) -> Sums:
        """Adds the partial sums of all device groups in all processes. The gradients get the storage sharding.

        Args:
            sums: partial sums of each local group.
            shares: division of the microbatches among the groups.
        """
        return wait_on_cpu(self._reduce(self._stack_sums(sums, shares), shares))

    def zero_gradients(self) -> Params:
        """Returns zeros in the shape of the gradients of all layers."""
        return self._zeros()

    def stack_for_exchange(self, sums: list[list[Sums]], shares: Shares) -> Sums:
        """Returns the sums of all devices in the form that `reduce_exchange` takes."""
        return self._stack_sums(sums, shares)[0]

    def select_params(self, params: Params) -> Params:
        """Returns the stored parameters that the stage reads."""
        return {name: params[name] for name in self.dtypes}

    def reduce_layer(self, grads: Params, sums: list[list[Sums]], shares: Shares, row: jax.Array) -> Params:
        """Same as `reduce`, but writes the result to one layer (`row`) of `grads`, which are consumed."""
        return wait_on_cpu(self._reduce_layer(grads, self._stack_sums(sums, shares), shares, row))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the gathered parameters."""
        return {name: jax.ShapeDtypeStruct(self._gathered_shape(name), dtype) for name, dtype in self.dtypes.items()}

    def shapes_on_group(self, group: ModelParallelGroup | MeshGroup) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns `shapes` with their shardings on a group."""
        shardings = {name: group.sharding(*self.layouts[name].compute) for name in self.dtypes}
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in self.shapes().items()}

    def sum_shardings_on(self, group: ModelParallelGroup | MeshGroup) -> PyTree:
        """Returns the shardings, on a group, of the sums of a microbatch, which have a leading axis."""
        return sum_shardings_on_group(group, self._trained_layouts)

    def _gathered_shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes[name].shape
        return shape[1:] if self.layered else shape

    def _gathered(self, params: Params, row: jax.Array) -> Params:
        if self.layered:
            params = {n: jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False) for n, x in params.items()}
        # Cast while still sharded, so that the narrower values are sent.
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

    def _stack_sums(self, parts: list[list[Sums]], shares: Shares) -> list[Sums]:
        return stack_sums(parts, shares, self._trained_layouts, self._mesh)


def _row_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))


def _layer_sharding(sharding: ParamSharding) -> ParamSharding:
    """Returns the sharding of one layer of a parameter whose layers are stacked."""
    dim = sharding.scatter_dim
    return replace(
        sharding,
        storage=PartitionSpec(*sharding.storage[1:]),
        compute=PartitionSpec(*sharding.compute[1:]),
        # If the gradient would be scattered along the layer axis, one layer is summed as a vector.
        scatter_dim=dim - 1 if dim else None,
        norm_grid=sharding.norm_grid[1:],
    )
