"""The functions of one microbatch that a layerwise step compiles: each part of a loss, and its derivative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from lm_trainer.core.batch import Batch
from lm_trainer.nn.loss_parts import LossParts, Stream
from lm_trainer.parallel.collectives import device_key
from lm_trainer.step.gradient import Sums
from lm_trainer.step.logged import logged_shapes, with_found
from lm_trainer.step.logged_parts import LoggedParts
from lm_trainer.step.model_def import ModelDef, Params
from lm_trainer.step.saving_layer import SavingLayer

Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""Those of parameters by name."""

SCALAR = jax.ShapeDtypeStruct((), np.int32)


@dataclass(frozen=True)
class PartFunctions:
    """The parts of a loss as functions of parameters by name.

    `params` are those that the part reads, of a layer without the axis over layers; `step` and `index` (of the
    microbatch) are int32 scalars, from which the key of dropout follows. Gradients are of `trainable`, with an axis in
    front, that of the batch shards once the groups' results are put together.
    """

    model: ModelDef
    parts: LossParts
    key_data: jax.Array | None
    """Data of the key; None switches dropout off."""
    trainable: Collection[str] = ()
    logged: LoggedParts | None = None
    """The values to take out; None: those of no call of `log`."""

    def enter(self, params: Params, batch: Batch, step: jax.Array, index: jax.Array) -> Stream:
        """The stream before the first layer."""

        def function(params: Params, batch: Batch, step: jax.Array, index: jax.Array) -> Stream:
            return self.parts.enter(self.model.merge_some(params), batch, self.key(step, index))

        if self.logged is None:
            return function(params, batch, step, index)
        stream, found = with_found(function)(params, batch, step, index)
        return stream._replace(logged=self.logged.start(found))

    def layer(self, place: int) -> Callable[..., Stream]:
        """`layer(params, stream, batch, number, step, index)`: the stream after a layer at this place of the period."""
        return self._layer(place, self.parts.layer)

    def saving_layer(self, place: int) -> SavingLayer | None:
        """`layer`, with a derivative that is handed values; None where that computes all of them again."""
        run = self.parts.saving_layer
        return None if run is None else SavingLayer(self._layer(place, run), self.trainable)

    def _layer(self, place: int, run: Callable[..., Stream]) -> Callable[..., Stream]:
        def layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            model = self.model.merge_some(params)
            return run(model, place, stream, batch, number, self.key(step, index))

        if (logged := self.logged) is None:
            return layer

        def logging_layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            after, found = with_found(layer)(params, stream, batch, number, step, index)
            return after._replace(logged=logged.add(stream.logged, number, found))

        return logging_layer

    def leave(
        self, params: Params, stream: Stream, batch: Batch, step: jax.Array, index: jax.Array
    ) -> dict[str, jax.Array]:
        """The sums that the loss reports, float32 scalars."""

        def function(params: Params, stream: Stream, batch: Batch, step: jax.Array, index: jax.Array) -> Any:
            return self.parts.leave(self.model.merge_some(params), stream, batch, self.key(step, index))

        if self.logged is None:
            total, weight, metrics = function(params, stream, batch, step, index)
        else:
            (total, weight, metrics), found = with_found(function)(params, stream, batch, step, index)
            metrics = self.logged.metrics(stream.logged, found, weight, metrics)
        return {"loss": total, "weight": weight, **metrics}

    def leave_gradient(
        self, params: Params, stream: Stream, batch: Batch, step: jax.Array, index: jax.Array
    ) -> tuple[Stream, Sums]:
        """The derivative of the loss for the stream, and the sums with the gradient for the parameters."""

        def objective(chosen: Params, stream: Stream) -> tuple[jax.Array, dict[str, jax.Array]]:
            scalars = self.leave({**params, **chosen}, stream, batch, step, index)
            return scalars["loss"], scalars

        (grads, d_stream), scalars = jax.grad(objective, argnums=(0, 1), has_aux=True)(self._chosen(params), stream)
        return d_stream, _lead(Sums(scalars, grads))

    def layer_gradient(self, place: int) -> Callable[..., tuple[Stream, Sums]]:
        """`(params, stream, batch, number, d_stream, step, index)`: as `leave_gradient`, for what enters the layer.

        The layer is computed again from what enters it.
        """
        layer = self.layer(place)

        def layer_gradient(  # noqa: PLR0913 - the layer's own, and the derivative
            params: Params,
            stream: Stream,
            batch: Batch,
            number: jax.Array,
            d_stream: Stream,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[Stream, Sums]:
            def function(chosen: Params, stream: Stream) -> Stream:
                return layer({**params, **chosen}, stream, batch, number, step, index)

            grads, before = jax.vjp(function, self._chosen(params), stream)[1](d_stream)
            return before, _lead(Sums({}, grads))

        return layer_gradient

    def enter_gradient(self, params: Params, batch: Batch, d_stream: Stream, step: jax.Array, index: jax.Array) -> Sums:
        """The gradient for the parameters of what comes before the layers."""

        def function(chosen: Params) -> Stream:
            return self.enter({**params, **chosen}, batch, step, index)

        (grads,) = jax.vjp(function, self._chosen(params))[1](d_stream)
        return _lead(Sums({}, grads))

    def reads(self, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch) -> Reads:
        """The parameters that each part reads; arguments as for `find_reads`."""
        return find_reads(self, shapes, batch)

    def with_logged(
        self, enter: Shapes, places: Sequence[Shapes], leave: Shapes, stream: Stream, batch: Batch
    ) -> PartFunctions:
        """Returns these functions with the values of calls of `log` inside them among the sums.

        Args:
            enter: the shapes of the parameters that `enter` reads.
            places: those that a layer reads, at each place of the period.
            leave: those that `leave` reads.
            stream: the shapes of what goes from part to part.
            batch: the shapes of a microbatch.
        """
        first = logged_shapes(self.enter, enter, batch, SCALAR, SCALAR)
        others = (stream, batch, SCALAR, SCALAR, SCALAR)
        layers = [logged_shapes(self.layer(place), params, *others) for place, params in enumerate(places)]
        if not any((first, *layers, logged_shapes(self.leave, leave, stream, batch, SCALAR, SCALAR))):
            return self
        return replace(self, logged=LoggedParts.make(first, layers, self.parts.num_layers))

    def _chosen(self, params: Params) -> Params:
        return {name: x for name, x in params.items() if name in self.trainable}

    def key(self, step: jax.Array, index: jax.Array) -> jax.Array | None:
        """The key of a microbatch, and of this device where several share it."""
        if self.key_data is None:
            return None
        return device_key(jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(self.key_data), step), index))


def _lead(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[None], sums)


class Reads(NamedTuple):
    """The parameters that each part reads: name -> the dtype in which it is given."""

    enter: dict[str, Any]
    places: list[dict[str, Any]]
    """Layers, one at each place of the period."""
    leave: dict[str, Any]
    stream: Stream
    """The shapes of what goes from part to part for a microbatch."""


def find_reads(functions: PartFunctions, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch) -> Reads:
    """The parameters that each part reads, found in its functions.

    Args:
        functions: of the parts.
        shapes: of all parameters.
        batch: the shapes of a microbatch.
    """
    prefixes = [f"blocks.{place}." for place in range(functions.parts.period)]
    others = {name: x for name, x in shapes.items() if not name.startswith(tuple(prefixes))}
    enter = dtypes_read(functions.enter, others, batch, SCALAR, SCALAR)
    given = {name: jax.ShapeDtypeStruct(shapes[name].shape, dtype) for name, dtype in enter.items()}
    stream = jax.eval_shape(functions.enter, given, batch, SCALAR, SCALAR)
    places = []
    for place, prefix in enumerate(prefixes):
        layer = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in shapes.items() if n.startswith(prefix)}
        places.append(dtypes_read(functions.layer(place), layer, stream, batch, SCALAR, SCALAR, SCALAR))
    return Reads(enter, places, dtypes_read(functions.leave, others, stream, batch, SCALAR, SCALAR), stream)


def dtypes_read(
    function: Callable[..., Any], params: Mapping[str, jax.ShapeDtypeStruct], *others: Any
) -> dict[str, Any]:
    """The parameters that a function reads, each with the dtype in which it may as well be given.

    That is the dtype that the function casts it to, where it does nothing else with it: cast before, it is gathered in
    fewer bytes, and the function computes the same.

    Args:
        function: `function(params, *others)`.
        params: name -> shape of each that it could read.
        others: shapes of its other arguments.
    """
    jaxpr = jax.make_jaxpr(function)(dict(params), *others).jaxpr
    uses: dict[Var, list[Any]] = {}
    for equation in jaxpr.eqns:
        for var in equation.invars:
            # The others are literals, such as the 1 of x + 1.
            if isinstance(var, Var):
                uses.setdefault(var, []).append(equation)
    # Dicts are flattened in the order of their keys.
    arguments = zip(sorted(params), jaxpr.invars, strict=False)
    return {name: _narrowest(params[name].dtype, uses[var]) for name, var in arguments if var in uses}


def _narrowest(dtype: Any, uses: list[Any]) -> Any:
    casts = {use.params["new_dtype"] if use.primitive.name == "convert_element_type" else dtype for use in uses}
    wanted = jnp.dtype(casts.pop())
    return wanted if not casts and wanted.itemsize < dtype.itemsize else dtype
