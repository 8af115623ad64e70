"""Parameters that stay sharded until a layer reads them, in a program over the whole mesh.

This is fully sharded data parallelism (Zhao et al. 2023, arXiv 2304.11277).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.custom_derivatives import linear_call
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.read import parameter_reader
from lm_trainer.parallel.mesh import BATCH_AXES, spec_axes
from lm_trainer.step.state.model_def import ModelDef, Params
from lm_trainer.step.state.state_sharding import StateSharding

_LAYERS = "layers"


class GatherWhereRead:
    """Gathers parameters over the batch axes where a computation reads them, in the dtype in which they are read.

    Gradients are reduce-scattered, in the same dtype, to the shards that store them. Parameters are instead gathered at
    the start of the computation if they are not read by `nn.read` (possible in a user's model), if a pipeline would
    gather their layers once per row, or if each device stores whole layers.

    The gradient of an embedding table that is sharded along its columns is computed in shards: an all-to-all sends the
    gradients of the looked-up rows to the devices that store the columns. A device with N tokens sends N x D numbers,
    whereas a sum of gradients of the table would send V x D.

    Args:
        model: model that the parameters belong to.
        sharding: shardings of the parameters.
    """

    def __init__(self, model: ModelDef, sharding: StateSharding):
        self._mesh, self._params = sharding.mesh, sharding.params
        sharded = {name for name, param in self._params.items() if self._num_batch_shards(param.storage) > 1}
        layers = {name for name, axes in model.axes.items() if axes[:1] == (_LAYERS,)}
        reread = layers if self._mesh.shape["pipeline"] > 1 else set()
        self._late = {
            n for n in sharded - reread if n not in layers or self._num_batch_shards(self._params[n].storage[:1]) == 1
        }
        self._read: set[str] = set()

    def _num_batch_shards(self, spec: PartitionSpec) -> int:
        return math.prod(self._mesh.shape[axis] for entry in spec for axis in spec_axes(entry) if axis in BATCH_AXES)

    def gather_unread(self, function: Callable[..., PyTree], params: Params, *others: PyTree) -> Params:
        """Gathers the parameters that `function(params, *others)`, traced under `gather_on_read`, does not gather."""
        if self._late:
            with self.gather_on_read():
                jax.eval_shape(function, params, *others)
        return {
            name: x
            if name in self._read
            else jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, self._params[name].compute))
            for name, x in params.items()
        }

    @contextmanager
    def gather_on_read(self) -> Iterator[None]:
        """Gathers parameters where they are read, while a computation is traced in this context."""
        if not self._late:
            yield
            return
        with parameter_reader(self._gather):
            yield

    def _gather(self, name: str, values: jax.Array, dtype: DTypeLike) -> jax.Array:
        if name not in self._late:
            return values.astype(dtype)
        self._read.add(name)
        param = self._params[name]
        return _gather_with_reduce_scatter(
            values, dtype, *(self._sharding_of_last_dims(spec, values.ndim) for spec in (param.storage, param.compute))
        )

    def _sharding_of_last_dims(self, spec: PartitionSpec, count: int) -> NamedSharding:
        """Returns the sharding of the last `count` dimensions; one layer lacks the first dimension of a stack."""
        entries = [spec_axes(entry) for entry in spec[len(spec) - count :]]
        inside = jax.sharding.get_abstract_mesh()
        if not inside.manual_axes:
            return NamedSharding(self._mesh, PartitionSpec(*entries))
        # Inside `shard_map`, only the axes that are not manual can be used.
        free = [tuple(axis for axis in axes if axis not in inside.manual_axes) for axes in entries]
        return NamedSharding(inside, PartitionSpec(*free))


def _gather_with_reduce_scatter(
    x: jax.Array, dtype: DTypeLike, storage: NamedSharding, compute: NamedSharding
) -> jax.Array:
    constrained, stored_dtype = jax.lax.with_sharding_constraint, x.dtype

    def gather(_: tuple[()], x: jax.Array) -> jax.Array:
        # Cast while still sharded, so that the narrower values are sent.
        return constrained(constrained(constrained(x, storage).astype(dtype), storage), compute)

    def reduce_scatter(_: tuple[()], cotangent: jax.Array) -> jax.Array:
        # The transpose of the constraint to `compute` would be the same constraint, which gives every device the
        # unsharded sum.
        return constrained(constrained(cotangent, storage).astype(stored_dtype), storage)

    return linear_call(gather, reduce_scatter, (), x)
