"""Splits a loss into embedding, layers and head, as functions of these stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.layer_sections import slot_of_each_layer
from lm_trainer.nn.stages import LossSums, StagedLoss, Stream
from lm_trainer.parallel.collectives import device_key
from lm_trainer.step.loss.gradient import Sums, validate_loss
from lm_trainer.step.loss.logged import logged_shapes, with_logged_values
from lm_trainer.step.staged.logged_stages import LoggedStages
from lm_trainer.step.staged.saving_layer import SavingLayer
from lm_trainer.step.staged.stage_functions import SCALAR, StageFunctions
from lm_trainer.step.state.model_def import ModelDef, Params

if TYPE_CHECKING:
    from jax.typing import DTypeLike

Forward = Callable[..., Stream]
"""`forward(params, stream, batch, number, step, index)` returns the output of a stage."""


class Reads(NamedTuple):
    """Parameters that each stage reads: name -> dtype in which the parameter is passed."""

    embed: dict[str, DTypeLike]
    layers: list[dict[str, DTypeLike]]
    """Parameters for each kind of layer."""
    head: dict[str, DTypeLike]
    stream: Stream
    """Shapes of the values that are passed from stage to stage for a microbatch."""


@dataclass(frozen=True)
class SplitLoss:
    """Splits a loss into stages, which are functions of named parameters (see `StageFunctions`)."""

    model: ModelDef
    loss: StagedLoss
    key_data: jax.Array | None
    """Data of the random key; None disables dropout."""
    trainable: Collection[str] = ()
    logs: bool = True
    """Also return values that are logged inside the stages, as sums."""

    def stages(self, batch: Batch, *, saves: bool = False) -> list[StageFunctions]:
        """Returns the embedding, one stage for each kind of layer, and the head.

        Args:
            batch: shapes of a microbatch.
            saves: True if layers save residuals for their backward pass, provided that the loss selects any.
        """
        reads = self.find_reads(batch)
        logged = self._find_logged(reads, batch) if self.logs else None
        embed = self._make_embed(logged)
        stages = [StageFunctions("enter", reads.embed, _without_residuals(embed), self._make_gradient(embed))]
        for kind, (names, layers) in enumerate(zip(reads.layers, self.loss.layers_by_kind, strict=True)):
            if saves and self.loss.saving_layer is not None:
                saving = SavingLayer(self._make_layer(kind, self.loss.saving_layer, logged), self.trainable)
                forward, gradient = saving.forward, saving.gradient
            else:
                layer = self._make_layer(kind, self.loss.layer, logged)
                forward, gradient = _without_residuals(layer), self._make_gradient(layer)
            stages.append(StageFunctions(f"layer {kind}", names, forward, gradient, layers=layers))
        head = self._make_head(logged)
        return [*stages, StageFunctions("leave", reads.head, gradient=self._make_head_gradient(head), losses=head)]

    def find_reads(self, batch: Batch) -> Reads:
        """Traces the stages to find the parameters that each of them reads; `batch` has the shapes of a microbatch."""
        shapes, prefixes = self.model.shapes, self.loss.layers
        outside_layers = {name: x for name, x in shapes.items() if not name.startswith(prefixes)}
        embed, arguments = self._make_embed(), (batch, None, SCALAR, SCALAR)
        first = find_read_dtypes(embed, outside_layers, None, *arguments)
        stream = jax.eval_shape(embed, _shapes_with_dtypes(shapes, first), None, *arguments)
        layers = []
        for kind, prefix in enumerate(prefixes):
            of_layer = {
                n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in shapes.items() if n.startswith(prefix)
            }
            layer = self._make_layer(kind, self.loss.layer)
            layers.append(find_read_dtypes(layer, of_layer, stream, batch, SCALAR, SCALAR, SCALAR))
        return Reads(first, layers, find_read_dtypes(self._make_head(), outside_layers, stream, *arguments), stream)

    def microbatch_key(self, step: jax.Array, index: jax.Array) -> jax.Array | None:
        """Returns the random key of a microbatch, specific to this device if several devices share the microbatch."""
        if self.key_data is None:
            return None
        return device_key(jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(self.key_data), step), index))

    def _make_embed(self, logged: LoggedStages | None = None) -> Forward:
        def enter(
            params: Params, stream: None, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> Stream:
            del stream, number
            return self.loss.embed(self.model.merge_some(params), batch, self.microbatch_key(step, index))

        if logged is None:
            return enter

        def logging_enter(*args: PyTree) -> Stream:
            stream, values = with_logged_values(enter)(*args)
            return stream._replace(logged=logged.start_arrays(values))

        return logging_enter

    def _make_layer(self, kind: int, run: Callable[..., Stream], logged: LoggedStages | None = None) -> Forward:
        def layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            model = self.model.merge_some(params)
            return run(model, kind, stream, batch, number, self.microbatch_key(step, index))

        if logged is None:
            return layer

        def logging_layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            output, values = with_logged_values(layer)(params, stream, batch, number, step, index)
            return output._replace(logged=logged.add_layer(stream.logged, number, values))

        return logging_layer

    def _make_head(self, logged: LoggedStages | None = None) -> Callable[..., dict[str, jax.Array]]:
        def function(
            params: Params, stream: Stream, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> LossSums:
            del number
            return validate_loss(
                self.loss.head(self.model.merge_some(params), stream, batch, self.microbatch_key(step, index))
            )

        def leave(
            params: Params, stream: Stream, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> dict[str, jax.Array]:
            if logged is None:
                total, weight, metrics = function(params, stream, batch, number, step, index)
            else:
                arguments = (params, stream, batch, number, step, index)
                (total, weight, metrics), values = with_logged_values(function)(*arguments)
                metrics = logged.add_to_metrics(stream.logged, values, weight, metrics)
            return {"loss": total, "weight": weight, **metrics}

        return leave

    def _make_gradient(self, forward: Forward) -> Callable[..., tuple[PyTree, Sums]]:
        """Makes the backward pass of a stage, which recomputes the activations of the stage."""

        def gradient(  # noqa: PLR0913 - the signature of every stage gradient
            params: Params,
            stream: Stream | None,
            handed_on: PyTree,
            batch: Batch,
            number: jax.Array | None,
            d_stream: Stream,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[PyTree, Sums]:
            del handed_on

            def function(trained: Params, stream: Stream | None) -> Stream:
                return forward({**params, **trained}, stream, batch, number, step, index)

            grads, d_input = jax.vjp(function, self._select_trained(params), stream)[1](d_stream)
            return d_input, _add_group_axis(Sums({}, grads))

        return gradient

    def _make_head_gradient(self, head: Callable[..., dict[str, jax.Array]]) -> Callable[..., tuple[PyTree, Sums]]:
        def leave_gradient(  # noqa: PLR0913 - the signature of every stage gradient
            params: Params,
            stream: Stream,
            handed_on: PyTree,
            batch: Batch,
            number: None,
            d_stream: None,
            step: jax.Array,
            index: jax.Array,
        ) -> tuple[Stream, Sums]:
            del handed_on, d_stream

            def objective(trained: Params, stream: Stream) -> tuple[jax.Array, dict[str, jax.Array]]:
                scalars = head({**params, **trained}, stream, batch, number, step, index)
                return scalars["loss"], scalars

            (grads, d_input), scalars = jax.grad(objective, argnums=(0, 1), has_aux=True)(
                self._select_trained(params), stream
            )
            return d_input, _add_group_axis(Sums(scalars, grads))

        return leave_gradient

    def _find_logged(self, reads: Reads, batch: Batch) -> LoggedStages | None:
        """Finds the calls of `log` in the stages; returns None if no stage logs."""
        shapes, stream, arguments = self.model.shapes, reads.stream, (batch, None, SCALAR, SCALAR)
        first = logged_shapes(self._make_embed(), _shapes_with_dtypes(shapes, reads.embed), None, *arguments)
        layers = [
            logged_shapes(
                self._make_layer(kind, self.loss.layer),
                _shapes_with_dtypes(shapes, names, layered=True),
                stream,
                batch,
                SCALAR,
                SCALAR,
                SCALAR,
            )
            for kind, names in enumerate(reads.layers)
        ]
        if not any(
            (
                first,
                *layers,
                logged_shapes(self._make_head(), _shapes_with_dtypes(shapes, reads.head), stream, *arguments),
            )
        ):
            return None
        kinds = [kind for kind, _ in slot_of_each_layer(self.loss.layers_by_kind)]
        return LoggedStages.from_shapes(first, [layers[kind] for kind in kinds])

    def _select_trained(self, params: Params) -> Params:
        return {name: x for name, x in params.items() if name in self.trainable}


def _without_residuals(forward: Forward) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns `forward` as the function of a stage that has no residuals."""

    # The names of the function and its arguments are part of the program hash.
    def after(
        params: Params,
        stream: Stream | None,
        batch: Batch,
        number: jax.Array | None,
        step: jax.Array,
        index: jax.Array,
    ) -> tuple[Stream, tuple[()]]:
        return forward(params, stream, batch, number, step, index), ()

    return after


def _add_group_axis(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[None], sums)


def _shapes_with_dtypes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], dtypes: Mapping[str, DTypeLike], *, layered: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    dims = slice(1 if layered else 0, None)
    return {name: jax.ShapeDtypeStruct(shapes[name].shape[dims], dtype) for name, dtype in dtypes.items()}


def find_read_dtypes(
    function: Callable[..., PyTree], params: Mapping[str, jax.ShapeDtypeStruct], *others: PyTree
) -> dict[str, DTypeLike]:
    """Returns the parameters that a function reads, each with the narrowest dtype in which it can be passed.

    If the function only casts a parameter, this is the dtype of the cast: casting before the gather sends fewer bytes,
    and the function computes the same result.

    Args:
        function: `function(params, *others)`.
        params: name -> shape of each parameter that the function may read.
        others: shapes of the other arguments.
    """
    jaxpr = jax.make_jaxpr(function)(dict(params), *others).jaxpr
    uses: dict[Var, list[JaxprEqn]] = {}
    for equation in jaxpr.eqns:
        for var in equation.invars:
            # The other variables are literals, such as the 1 of x + 1.
            if isinstance(var, Var):
                uses.setdefault(var, []).append(equation)
    # Dicts are flattened in the order of their keys.
    arguments = zip(sorted(params), jaxpr.invars, strict=False)
    return {name: _narrowest_dtype(params[name].dtype, uses[var]) for name, var in arguments if var in uses}


def _narrowest_dtype(dtype: np.dtype, uses: Sequence[JaxprEqn]) -> DTypeLike:
    casts = {use.params["new_dtype"] if use.primitive.name == "convert_element_type" else dtype for use in uses}
    narrow = jnp.dtype(casts.pop())
    return narrow if not casts and narrow.itemsize < dtype.itemsize else dtype
