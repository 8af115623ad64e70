"""Splits a loss into embedding, layers and head, as functions of these stages.

A `MemoryStack`, such as an encoder, has its own embedding and layers, which come first. Its result is computed together
with the embedding of the other layers, which pass it on as a part of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.attention_kernel import summing_in_fixed_order
from lm_trainer.nn.layer_sections import slot_of_each_layer
from lm_trainer.nn.stages import LossSums, MemoryStack, StagedLoss, Stream
from lm_trainer.parallel.collectives import device_key
from lm_trainer.step.loss.gradient import Sums, validate_loss
from lm_trainer.step.loss.logged import logged_shapes, with_logged_values
from lm_trainer.step.staged.logged_stages import LoggedStack, LoggedStages
from lm_trainer.step.staged.read_dtypes import find_read_dtypes, find_value_dtypes
from lm_trainer.step.staged.saving_layer import SavingLayer
from lm_trainer.step.staged.stage_functions import SCALAR, StageFunctions
from lm_trainer.step.state.model_def import ModelDef, Params

if TYPE_CHECKING:
    from jax.typing import DTypeLike

Forward = Callable[..., Stream]
"""`forward(params, stream, batch, number, step, index)` returns the output of a stage."""


ReadDtypes = dict[str, "DTypeLike"]
"""Name of each parameter that a stage reads -> dtype in which it is passed."""


class StageReads(NamedTuple):
    """Parameters that a stage other than a layer reads."""

    forward: ReadDtypes
    gradient: ReadDtypes | None
    """Parameters for the backward pass; None if nothing is trained."""


class StackReads(NamedTuple):
    """Parameters that the stages of a stack read."""

    embed: StageReads
    layers: list[ReadDtypes]
    """Parameters for each kind of layer."""
    stream: Stream
    """Shapes of the values that are passed from layer to layer for a microbatch."""


class Reads(NamedTuple):
    """Parameters that each stage reads."""

    stacks: list[StackReads]
    head: StageReads


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
        """Returns, for each stack, the embedding and one stage for each kind of layer; then the head.

        Args:
            batch: shapes of a microbatch.
            saves: True if layers save residuals for their backward pass, provided that the loss selects any.
        """
        reads = self.find_reads(batch)
        logged = self._find_logged(reads, batch) if self.logs else None
        stages = list[StageFunctions]()
        for index, of_stack in enumerate(reads.stacks):
            stages += self._stages_of_stack(index, of_stack, logged, saves=saves)
        head = self._make_head(logged)
        gradient = self._complete_params(self._make_head_gradient(head), reads.head.forward)
        shared = self.loss.memory is not None
        return [*stages, StageFunctions("leave", *reads.head, gradient=gradient, losses=head, shares_input=shared)]

    def _stages_of_stack(
        self, index: int, reads: StackReads, logged: LoggedStages | None, *, saves: bool
    ) -> Iterator[StageFunctions]:
        stack = self.loss.stacks[index]
        prefix = f"{stack.name} " if isinstance(stack, MemoryStack) else ""
        shared = self.loss.memory is not None and stack is self.loss
        embed = self._make_embed(index, logged)
        gradient = self._complete_params(self._make_gradient(embed), reads.embed.forward)
        yield StageFunctions(f"{prefix}enter", *reads.embed, _without_residuals(embed), gradient)
        for kind, (names, layers) in enumerate(zip(reads.layers, stack.layers_by_kind, strict=True)):
            if saves and stack.saving_layer is not None:
                saving = SavingLayer(self._make_layer(index, kind, stack.saving_layer, logged), self.trainable)
                forward, gradient = saving.forward, saving.gradient
            else:
                layer = self._make_layer(index, kind, stack.layer, logged)
                forward, gradient = _without_residuals(layer, memory=False), self._make_gradient(layer)
            name = f"{prefix}layer {kind}"
            yield StageFunctions(name, names, forward=forward, gradient=gradient, layers=layers, shares_input=shared)

    def find_reads(self, batch: Batch) -> Reads:
        """Traces the stages to find the parameters that each of them reads; `batch` has the shapes of a microbatch."""
        shapes, prefixes = self.model.shapes, tuple(prefix for stack in self.loss.stacks for prefix in stack.layers)
        outside_layers = {name: x for name, x in shapes.items() if not name.startswith(prefixes)}
        arguments, stream, stacks = (batch, None, SCALAR, SCALAR), None, list[StackReads]()
        for index, stack in enumerate(self.loss.stacks):
            embed, before = self._make_embed(index), stream
            stream = jax.eval_shape(embed, outside_layers, before, *arguments)
            # What is logged is a result too.
            forward = find_value_dtypes(with_logged_values(embed), outside_layers, before, *arguments)
            backward = (before, (), batch, None, stream, SCALAR, SCALAR)
            first = self._stage_reads(forward, self._make_gradient(embed), outside_layers, *backward)
            layers = []
            for kind, prefix in enumerate(stack.layers):
                of_layer = {
                    n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in shapes.items() if n.startswith(prefix)
                }
                layer = self._make_layer(index, kind, stack.layer)
                layers.append(find_read_dtypes(layer, of_layer, stream, batch, SCALAR, SCALAR, SCALAR))
            stacks.append(StackReads(first, layers, stream))
        head, backward = self._make_head(), (stream, (), batch, None, None, SCALAR, SCALAR)

        def head_with_values(*args: PyTree) -> dict[str, PyTree]:
            scalars, values = with_logged_values(head)(*args)
            return {**scalars, "logged values": values}

        forward = find_value_dtypes(head_with_values, outside_layers, stream, *arguments)
        gradient = self._make_head_gradient(head_with_values)
        return Reads(stacks, self._stage_reads(forward, gradient, outside_layers, *backward))

    def _stage_reads(
        self,
        forward: ReadDtypes,
        gradient: Callable[..., PyTree],
        params: Mapping[str, jax.ShapeDtypeStruct],
        *others: PyTree,
    ) -> StageReads:
        return StageReads(forward, find_value_dtypes(gradient, params, *others) if self.trainable else None)

    def _complete_params(self, gradient: Callable[..., PyTree], names: Collection[str]) -> Callable[..., PyTree]:
        """Returns a backward pass that takes the parameters which `find_value_dtypes` finds for `gradient`.

        Args:
            gradient: the backward pass of a stage.
            names: parameters that the forward pass reads.
        """

        @wraps(gradient)  # the program hash contains the names of the function and its arguments
        def with_params(params: Params, *others: PyTree) -> PyTree:
            stored = {name: self.model.shapes[name] for name in names}
            # The derivative has the dtype of the parameter. A value that is not needed would show if it were used.
            complete = {
                name: params[name].astype(x.dtype) if name in params else jnp.full(x.shape, jnp.nan, x.dtype)
                for name, x in stored.items()
            }
            return gradient(complete, *others)

        return with_params

    def microbatch_key(self, step: jax.Array, index: jax.Array) -> jax.Array | None:
        """Returns the random key of a microbatch, specific to this device if several devices share the microbatch."""
        if self.key_data is None:
            return None
        return device_key(jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(self.key_data), step), index))

    def _make_embed(self, stack: int, logged: LoggedStages | None = None) -> Forward:
        embed, memory = self.loss.stacks[stack].embed, self.loss.memory

        def enter(
            params: Params, stream: Stream | None, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> Stream:
            del number
            model, key = self.model.merge_some(params), self.microbatch_key(step, index)
            with summing_in_fixed_order(True):
                entered = embed(model, batch, key)
            if stream is None:
                return entered
            assert memory is not None
            return entered._replace(memory=memory.finish(model, stream, batch, key))

        if logged is None:
            return enter

        def logging_enter(params: Params, stream: Stream | None, *others: PyTree) -> Stream:
            entered, values = with_logged_values(enter)(params, stream, *others)
            if stream is None:
                return entered._replace(logged=logged.start_arrays(values))
            return entered._replace(logged=logged.add_embed(stream.logged, stack, values))

        return logging_enter

    def _make_layer(
        self, stack: int, kind: int, run: Callable[..., Stream], logged: LoggedStages | None = None
    ) -> Forward:
        def layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            model = self.model.merge_some(params)
            # Also where only shapes are traced: the residuals depend on the attention kernel.
            with summing_in_fixed_order(True):
                output = run(model, kind, stream, batch, number, self.microbatch_key(step, index))
            return output._replace(memory=stream.memory)

        if logged is None:
            return layer

        def logging_layer(
            params: Params, stream: Stream, batch: Batch, number: jax.Array, step: jax.Array, index: jax.Array
        ) -> Stream:
            output, values = with_logged_values(layer)(params, stream, batch, number, step, index)
            return output._replace(logged=logged.add_layer(stream.logged, stack, number, values))

        return logging_layer

    def _make_head(self, logged: LoggedStages | None = None) -> Callable[..., dict[str, jax.Array]]:
        def function(
            params: Params, stream: Stream, batch: Batch, number: None, step: jax.Array, index: jax.Array
        ) -> LossSums:
            del number
            model, key = self.model.merge_some(params), self.microbatch_key(step, index)
            with summing_in_fixed_order(True):
                return validate_loss(self.loss.head(model, stream, batch, key))

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
        shapes, arguments, stream = self.model.shapes, (batch, None, SCALAR, SCALAR), None
        stacks = list[LoggedStack]()
        for index, (stack, of_stack) in enumerate(zip(self.loss.stacks, reads.stacks, strict=True)):
            first = _shapes_with_dtypes(shapes, of_stack.embed.forward)
            embed, stream = logged_shapes(self._make_embed(index), first, stream, *arguments), of_stack.stream
            layers = [
                logged_shapes(
                    self._make_layer(index, kind, stack.layer),
                    _shapes_with_dtypes(shapes, names, layered=True),
                    stream,
                    batch,
                    SCALAR,
                    SCALAR,
                    SCALAR,
                )
                for kind, names in enumerate(of_stack.layers)
            ]
            kinds = [kind for kind, _ in slot_of_each_layer(stack.layers_by_kind)]
            stacks.append(LoggedStack(embed, [layers[kind] for kind in kinds]))
        head = logged_shapes(self._make_head(), _shapes_with_dtypes(shapes, reads.head.forward), stream, *arguments)
        if not head and not any(shapes for stack in stacks for shapes in (stack.embed, *stack.layers)):
            return None
        return LoggedStages.from_shapes(stacks)

    def _select_trained(self, params: Params) -> Params:
        return {name: x for name, x in params.items() if name in self.trainable}


def _without_residuals(forward: Forward, *, memory: bool = True) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns `forward` as the function of a stage that has no residuals and, without `memory`, returns no memory."""

    # The names of the function and its arguments are part of the program hash.
    def after(
        params: Params,
        stream: Stream | None,
        batch: Batch,
        number: jax.Array | None,
        step: jax.Array,
        index: jax.Array,
    ) -> tuple[Stream, tuple[()]]:
        output = forward(params, stream, batch, number, step, index)
        return output if memory else output._replace(memory=None), ()

    return after


def _add_group_axis(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[None], sums)


def _shapes_with_dtypes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], dtypes: Mapping[str, DTypeLike], *, layered: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    dims = slice(1 if layered else 0, None)
    return {name: jax.ShapeDtypeStruct(shapes[name].shape[dims], dtype) for name, dtype in dtypes.items()}
