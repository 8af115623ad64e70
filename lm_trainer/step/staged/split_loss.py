"""A loss that is split into embedding, layers and head, as the functions of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from lm_trainer.core.batch import Batch
from lm_trainer.nn.stages import StagedLoss, Stream
from lm_trainer.parallel.collectives import device_key
from lm_trainer.step.loss.gradient import Sums, checked_loss
from lm_trainer.step.loss.logged import logged_shapes, with_found
from lm_trainer.step.staged.logged_stages import LoggedStages
from lm_trainer.step.staged.saving_layer import SavingLayer
from lm_trainer.step.staged.stage_functions import SCALAR, StageFunctions
from lm_trainer.step.state.model_def import ModelDef, Params

Forward = Callable[..., Stream]
"""`forward(params, stream, batch, number, step, index)`."""


class Reads(NamedTuple):
    """The parameters that each stage reads: name -> the dtype in which it is given."""

    embed: dict[str, Any]
    layers: list[dict[str, Any]]
    """Those of a layer, at each place of the period."""
    head: dict[str, Any]
    stream: Stream
    """The shapes of what goes from stage to stage for a microbatch."""


@dataclass(frozen=True)
class SplitLoss:
    """The stages of a loss as functions of parameters by name, as `StageFunctions` tells."""

    model: ModelDef
    loss: StagedLoss
    key_data: jax.Array | None
    """Data of the key; None switches dropout off."""
    trainable: Collection[str] = ()
    logs: bool = True
    """Brings what is logged inside the stages out of them, as sums."""

    def stages(self, batch: Batch, *, saves: bool = False) -> list[StageFunctions]:
        """The embedding, a layer at each place of the period, and the head.

        Args:
            batch: the shapes of a microbatch.
            saves: layers hand values on to their derivatives, where the loss says which.
        """
        reads = self.reads(batch)
        logged = self._logged(reads, batch) if self.logs else None
        embed = self._embed(logged)
        stages = [StageFunctions("enter", reads.embed, _alone(embed), self._gradient(embed))]
        for place, names in enumerate(reads.layers):
            layers = range(place, self.loss.num_layers, self.loss.period)
            if saves and self.loss.saving_layer is not None:
                saving = SavingLayer(self._layer(place, self.loss.saving_layer, logged), self.trainable)
                forward, gradient = saving.forward, saving.gradient
            else:
                layer = self._layer(place, self.loss.layer, logged)
                forward, gradient = _alone(layer), self._gradient(layer)
            stages.append(StageFunctions(f"layer {place}", names, forward, gradient, layers=layers))
        head = self._head(logged)
        return [*stages, StageFunctions("leave", reads.head, gradient=self._head_gradient(head), losses=head)]

    def reads(self, batch: Batch) -> Reads:
        """The parameters that each stage reads, found in its functions; `batch` has the shapes of a microbatch."""
        shapes, prefixes = self.model.shapes, self.loss.layers
        others = {name: x for name, x in shapes.items() if not name.startswith(prefixes)}
        embed, given = self._embed(), (batch, None, SCALAR, SCALAR)
        first = dtypes_read(embed, others, None, *given)
        stream = jax.eval_shape(embed, _shapes(shapes, first), None, *given)
        places = []
        for place, prefix in enumerate(prefixes):
            own = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in shapes.items() if n.startswith(prefix)}
            layer = self._layer(place, self.loss.layer)
            places.append(dtypes_read(layer, own, stream, batch, SCALAR, SCALAR, SCALAR))
        return Reads(first, places, dtypes_read(self._head(), others, stream, *given), stream)

    def key(self, step: jax.Array, index: jax.Array) -> jax.Array | None:
        """The key of a microbatch, and of this device where several share it."""
        if self.key_data is None:
            return None
        return device_key(jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(self.key_data), step), index))

    def _embed(self, logged: LoggedStages | None = None) -> Forward:
        def enter(
            params: Params, stream: None, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> Stream:
            del stream, number
            return self.loss.embed(self.model.merge_some(params), batch, self.key(step, index))

        if logged is None:
            return enter

        def logging_enter(*args: Any) -> Stream:
            stream, found = with_found(enter)(*args)
            return stream._replace(logged=logged.start(found))

        return logging_enter

    def _layer(self, place: int, run: Callable[..., Stream], logged: LoggedStages | None = None) -> Forward:
        def layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            model = self.model.merge_some(params)
            return run(model, place, stream, batch, number, self.key(step, index))

        if logged is None:
            return layer

        def logging_layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            after, found = with_found(layer)(params, stream, batch, number, step, index)
            return after._replace(logged=logged.add(stream.logged, number, found))

        return logging_layer

    def _head(self, logged: LoggedStages | None = None) -> Callable[..., dict[str, jax.Array]]:
        def function(
            params: Params, stream: Stream, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> Any:
            del number
            return checked_loss(self.loss.head(self.model.merge_some(params), stream, batch, self.key(step, index)))

        def leave(
            params: Params, stream: Stream, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> dict[str, jax.Array]:
            if logged is None:
                total, weight, metrics = function(params, stream, batch, number, step, index)
            else:
                given = (params, stream, batch, number, step, index)
                (total, weight, metrics), found = with_found(function)(*given)
                metrics = logged.metrics(stream.logged, found, weight, metrics)
            return {"loss": total, "weight": weight, **metrics}

        return leave

    def _gradient(self, forward: Forward) -> Callable[..., tuple[Any, Sums]]:
        """The derivative of a stage that computes again what is inside of it."""

        def gradient(  # noqa: PLR0913 - as every gradient of a stage
            params: Params,
            stream: Any,
            handed_on: Any,
            batch: Batch,
            number: Any,
            d_stream: Stream,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[Any, Sums]:
            del handed_on

            def function(chosen: Params, stream: Any) -> Stream:
                return forward({**params, **chosen}, stream, batch, number, step, index)

            grads, before = jax.vjp(function, self._chosen(params), stream)[1](d_stream)
            return before, _lead(Sums({}, grads))

        return gradient

    def _head_gradient(self, head: Callable[..., dict[str, jax.Array]]) -> Callable[..., tuple[Any, Sums]]:
        def leave_gradient(  # noqa: PLR0913 - as every gradient of a stage
            params: Params,
            stream: Stream,
            handed_on: Any,
            batch: Batch,
            number: None,
            d_stream: None,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[Stream, Sums]:
            del handed_on, d_stream

            def objective(chosen: Params, stream: Stream) -> tuple[jax.Array, dict[str, jax.Array]]:
                scalars = head({**params, **chosen}, stream, batch, number, step, index)
                return scalars["loss"], scalars

            (grads, d_before), scalars = jax.grad(objective, argnums=(0, 1), has_aux=True)(self._chosen(params), stream)
            return d_before, _lead(Sums(scalars, grads))

        return leave_gradient

    def _logged(self, reads: Reads, batch: Batch) -> LoggedStages | None:
        """The calls of `log` in the stages; None where there are none."""
        shapes, stream, given = self.model.shapes, reads.stream, (batch, None, SCALAR, SCALAR)
        first = logged_shapes(self._embed(), _shapes(shapes, reads.embed), None, *given)
        layers = [
            logged_shapes(
                self._layer(place, self.loss.layer),
                _shapes(shapes, names, layered=True),
                stream,
                batch,
                SCALAR,
                SCALAR,
                SCALAR,
            )
            for place, names in enumerate(reads.layers)
        ]
        if not any((first, *layers, logged_shapes(self._head(), _shapes(shapes, reads.head), stream, *given))):
            return None
        return LoggedStages.make(first, layers, self.loss.num_layers)

    def _chosen(self, params: Params) -> Params:
        return {name: x for name, x in params.items() if name in self.trainable}


def _alone(forward: Forward) -> Callable[..., tuple[Any, Any]]:
    """`forward` with nothing that it hands on."""

    # The names of arguments are in the program's hash.
    def after(params: Params, stream: Any, batch: Batch, number: Any, step: jax.Array, index: jax.Array) -> Any:
        return forward(params, stream, batch, number, step, index), ()

    return after


def _lead(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[None], sums)


def _shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], dtypes: Mapping[str, Any], *, layered: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    cut = slice(1 if layered else 0, None)
    return {name: jax.ShapeDtypeStruct(shapes[name].shape[cut], dtype) for name, dtype in dtypes.items()}


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


def _narrowest(dtype: Any, uses: Sequence[Any]) -> Any:
    casts = {use.params["new_dtype"] if use.primitive.name == "convert_element_type" else dtype for use in uses}
    wanted = jnp.dtype(casts.pop())
    return wanted if not casts and wanted.itemsize < dtype.itemsize else dtype
