"""Parameters that lie in pieces until a layer reads them: fully sharded data parallelism (Zhao et al. 2023, arXiv
2304.11277), in a program over the whole mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.custom_derivatives import linear_call
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from lm_trainer.nn.read import read_by
from lm_trainer.parallel.mesh import BATCH_AXES, spec_axes
from lm_trainer.step.state.model_def import ModelDef, Params
from lm_trainer.step.state.state_sharding import StateSharding

_LAYERS = "layers"


class GatherWhereRead:
    """Gathers parameters over the batch axes where a computation reads them, in the dtype in which it does.

    Their gradients are added up over the devices in that dtype, each of which gets the piece that it stores. Gathered
    at the start instead is what nobody reads by `nn.read`, as a model of one's own may; layers that a pipeline reads
    again for each row; and layers that are whole on one device each.

    The gradient of a table whose rows are looked up, and which is cut along its columns, is made in pieces: XLA sends
    the gradients of the rows that were looked up, by an all-to-all, to the devices of their columns. From each device
    that is N x D numbers for its N tokens, where a sum of gradients of the table would be V x D.

    Args:
        model: whose parameters they are.
        sharding: where they lie.
    """

    def __init__(self, model: ModelDef, sharding: StateSharding):
        self._mesh, self._params = sharding.mesh, sharding.params
        self._cut = {name for name, param in self._params.items() if self._pieces(param.storage) > 1}
        layers = {name for name, axes in model.axes.items() if axes[:1] == (_LAYERS,)}
        again = layers if self._mesh.shape["pipeline"] > 1 else set()
        self._late = {n for n in self._cut - again if n not in layers or self._pieces(self._params[n].storage[:1]) == 1}
        self._read: set[str] = set()

    def _pieces(self, spec: Any) -> int:
        return math.prod(self._mesh.shape[axis] for entry in spec for axis in spec_axes(entry) if axis in BATCH_AXES)

    def whole_where_unread(self, function: Callable[..., Any], params: Params, *others: Any) -> Params:
        """The parameters as `function(params, *others)`, traced under `reading`, is to be given them."""
        if self._late:
            with self.reading():
                jax.eval_shape(function, params, *others)
        return {
            name: x
            if name in self._read
            else jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, self._params[name].compute))
            for name, x in params.items()
        }

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Says, while a computation is traced, that its parameters are to be gathered where it reads them."""
        if not self._late:
            yield
            return
        with read_by(self._gather):
            yield

    def _gather(self, name: str, values: jax.Array, dtype: DTypeLike) -> jax.Array:
        if name not in self._late:
            return values.astype(dtype)
        self._read.add(name)
        param = self._params[name]
        return _gathered(values, dtype, *(self._sharding(spec, values.ndim) for spec in (param.storage, param.compute)))

    def _sharding(self, spec: PartitionSpec, count: int) -> NamedSharding:
        """Sharding of the last `count` dimensions: one layer's slice lacks the first one of a stack."""
        entries = [spec_axes(entry) for entry in spec[len(spec) - count :]]
        inside = jax.sharding.get_abstract_mesh()
        if not inside.manual_axes:
            return NamedSharding(self._mesh, PartitionSpec(*entries))
        # Inside of a `shard_map` only the other axes are there to be cut over.
        free = [tuple(axis for axis in axes if axis not in inside.manual_axes) for axes in entries]
        return NamedSharding(inside, PartitionSpec(*free))


def _gathered(x: jax.Array, dtype: Any, storage: NamedSharding, compute: NamedSharding) -> jax.Array:
    constrained, stored_dtype = jax.lax.with_sharding_constraint, x.dtype

    def gather(_: Any, x: jax.Array) -> jax.Array:
        # Cast in pieces, so that the narrower values travel.
        return constrained(constrained(constrained(x, storage).astype(dtype), storage), compute)

    def reduce_scatter(_: Any, cotangent: jax.Array) -> jax.Array:
        # The transpose of a constraint to `compute` would be the same one, and the sum whole on every device.
        return constrained(constrained(cotangent, storage).astype(stored_dtype), storage)

    return linear_call(gather, reduce_scatter, (), x)
