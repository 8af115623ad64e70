"""The parameters that a program of a stage reads, which are gathered for its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.dispatch.device_groups import DeviceGroups, ModelParallelGroup, same_sharding
from lm_trainer.step.dispatch.mesh_executable import Exchange
from lm_trainer.step.dispatch.mesh_group import MeshGroup, MeshWide
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.state.model_def import Params

if TYPE_CHECKING:
    from jax.typing import DTypeLike


class ReadParams:
    """Parameters that a program reads, each in the dtype in which it is passed.

    The program that gathers them runs on all devices. It only moves and casts arrays, so its bits do not depend on the
    devices.

    Args:
        devices: devices that compute the stage.
        dtypes: name -> dtype in which the parameter is passed.
        shapes: name -> shape of each parameter in storage.
        program: name of the program that gathers them, in plans.
        results: name of its results, in plans.
        layered: whether the parameters of several layers are stacked along their first axis, of which one is read.
    """

    def __init__(
        self,
        devices: DeviceGroups | MeshWide,
        dtypes: Mapping[str, DTypeLike],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        program: str,
        results: str,
        *,
        layered: bool,
    ):
        self.dtypes, self._devices, self._layered = dict(dtypes), devices, layered
        self._program, self._results = program, results
        sharding, self._mesh = devices.sharding, devices.sharding.mesh
        stored = {name: sharding.params[name] for name in dtypes}
        self.layouts = {n: _layer_sharding(x) for n, x in stored.items()} if layered else stored
        self._shapes = {name: shapes[name] for name in dtypes}
        self.stored = {name: NamedSharding(self._mesh, self.layouts[name].storage) for name in dtypes}
        """Shardings of what is read, before it is gathered."""
        self._computed = {name: NamedSharding(self._mesh, self.layouts[name].compute) for name in dtypes}
        storage = {name: NamedSharding(self._mesh, stored[name].storage) for name in dtypes}
        self.at_rest = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=storage[name]) for name, x in self._shapes.items()
        }
        """Shapes of the parameters in storage, with their shardings."""
        # If these axes have size 1, storage and compute shardings agree, and no copy is made.
        in_place = not layered and all(x.dtype == dtypes[name] for name, x in self._shapes.items())
        in_place = in_place and all(same_sharding(self._computed[name], storage[name]) for name in dtypes)
        self._gather = None
        if not in_place:
            gather = jax.jit(self._gathered, out_shardings=self._computed)
            self._gather = Program(program, gather, results, queued=layered)

    def gather(self, params: Params, row: jax.Array) -> list[Params]:
        """Returns the parameters, gathered for computation on each local group.

        Args:
            params: all parameters of the model.
            row: index of the layer in the stacked parameters, an int32 scalar on all devices.
        """
        read = self.select(params)
        gathered = read if self._gather is None else wait_on_cpu(self._gather(read, row))
        return self._devices.group_views(gathered)

    def gather_exchange(self) -> Exchange:
        """Returns `gather` of a layer, `(params, row)`, for a program that computes meanwhile; see `select`."""
        arguments = (self.at_rest, row_shape(self._mesh))
        return Exchange(self._program, self._gathered, arguments, self._computed, self._results)

    def select(self, params: Params) -> Params:
        """Returns the stored parameters that the program reads."""
        return {name: params[name] for name in self.dtypes}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the gathered parameters."""
        dims = slice(1 if self._layered else 0, None)
        return {name: jax.ShapeDtypeStruct(x.shape[dims], self.dtypes[name]) for name, x in self._shapes.items()}

    def shapes_on_group(self, group: ModelParallelGroup | MeshGroup) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns `shapes` with their shardings on a group."""
        shardings = {name: group.sharding(*self.layouts[name].compute) for name in self.dtypes}
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in self.shapes().items()}

    def _gathered(self, params: Params, row: jax.Array) -> Params:
        if self._layered:
            params = {n: jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False) for n, x in params.items()}
        # Cast while still sharded, so that the narrower values are sent.
        cast = {name: x.astype(self.dtypes[name]) for name, x in params.items()}
        return {name: jax.lax.with_sharding_constraint(x, self.stored[name]) for name, x in cast.items()}


def row_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the shape of the index of a layer in the stacked parameters, on all devices."""
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
