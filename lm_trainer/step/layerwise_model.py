"""The parts of a model, found in its loss, and their executables for microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.groups import DeviceGroups, ModelParallelGroup, PlacedBatch
from lm_trainer.step.hutchinson_functions import HutchinsonFunctions
from lm_trainer.step.model_def import Params
from lm_trainer.step.part import Part
from lm_trainer.step.part_functions import SCALAR, PartFunctions
from lm_trainer.step.part_sharing import place_on_group, share_part, stream_on_group
from lm_trainer.step.per_group import PerGroupExecutable
from lm_trainer.step.saving_layer import SavingLayer

LAYERS_AT_ONCE = 2
"""Layers in the queue of a device, the one that is computed among them: arrays take memory once they are queued."""

Functions = PartFunctions | HutchinsonFunctions
"""The parts of a loss as functions, with their derivatives."""

PerMicrobatch = list[list[Any]]
"""For each local group a value of each of its microbatches."""


class Parts:
    """The parts of a loss: the parameters that each reads.

    Args:
        functions: of the parts.
        shapes: of all parameters.
        devices: where they are computed.
        batch: the shapes of a microbatch.
    """

    def __init__(
        self, functions: Functions, shapes: Mapping[str, jax.ShapeDtypeStruct], devices: DeviceGroups, batch: Batch
    ):
        self.devices, self._trainable = devices, functions.trainable
        self.num_layers, self.period = functions.parts.num_layers, functions.parts.period
        reads = functions.reads(shapes, batch)
        self.enter, self.leave = self._part(shapes, reads.enter), self._part(shapes, reads.leave)
        self.places = [self._part(shapes, read, layered=True) for read in reads.places]
        each = [part.shapes() for part in self.places]
        self.functions: Functions = functions.with_logged(
            self.enter.shapes(), each, self.leave.shapes(), reads.stream, batch
        )
        self.counts = {
            f"layer {place}": len(range(place, self.num_layers, self.period)) for place in range(self.period)
        }

    def _part(
        self, shapes: Mapping[str, jax.ShapeDtypeStruct], dtypes: Mapping[str, Any], *, layered: bool = False
    ) -> Part:
        return Part(self.devices, shapes, dtypes, self._trainable, layered=layered)

    def stream(self, batch: Batch) -> Any:
        """The shapes of what goes from part to part for a microbatch like `batch`."""
        others = (batch, SCALAR, SCALAR)
        enter = share_part(self.functions.enter, self.enter, self.devices.groups[0].mesh, others, "stream")
        return jax.eval_shape(enter, self.enter.shapes(), *others)

    def saving_layers(self) -> list[SavingLayer] | None:
        """The layers at each place of the period with derivatives that are handed values; None where none are."""
        # Where devices share a microbatch, each would have values of its own.
        if self.devices.groups[0].mesh.size > 1:
            return None
        found = [self.functions.saving_layer(place) for place in range(self.period)]
        return [layer for layer in found if layer is not None] or None

    def of_layer(self, number: int) -> Part:
        """The part of a layer."""
        return self.places[number % self.period]

    # Sent once: numbers from the host would be transfers of every step.

    @cached_property
    def _rows(self) -> list[jax.Array]:
        mesh, rows = self.devices.sharding.mesh, range(-(-self.num_layers // self.period))
        return [replicate(np.int32(row), mesh) for row in rows]

    @cached_property
    def _numbers(self) -> list[list[jax.Array]]:
        groups, layers = self.devices.groups, range(self.num_layers)
        return [[group.put(np.int32(layer)) for group in groups] for layer in layers]

    def row(self, number: int) -> jax.Array:
        """The position of a layer among those of its place, on all devices."""
        return self._rows[number // self.period]

    def number(self, layer: int) -> list[jax.Array]:
        """The number of a layer on each group."""
        return self._numbers[layer]

    def compile(
        self, function: Callable[..., Any], part: Part, others: Sequence[Any], returns: Any, *, donated: Any = ()
    ) -> PerGroupExecutable:
        """An executable on each group.

        Args:
            function: `function(params, *others)`.
            part: whose parameters it reads.
            others: the shapes of its other arguments, with streams as `stream` gives them.
            returns: as for `share_part`.
            donated: the arguments that it consumes.
        """
        groups = self.devices.groups

        def on_group(group: ModelParallelGroup) -> tuple[Any, ...]:
            return part.on(group), *place_on_group(others, group.mesh)

        def results(group: ModelParallelGroup) -> Any:
            kinds: dict[str, Any] = dict.fromkeys(("scalars", "kept"), group.sharding())
            kinds |= {"stream": stream_on_group(group.mesh), "sums": part.sums_on(group)}
            return jax.tree.map(lambda kind: kinds[kind], returns)

        shared = share_part(function, part, groups[0].mesh, others, returns)
        executable = PerGroupExecutable(shared, groups, results, donated=donated)
        executable.compile_for(on_group)
        return executable


class Turn(NamedTuple):
    """Microbatches that share what is gathered."""

    shares: Shares
    """Their division among all groups."""
    rows: PerMicrobatch
    indices: PerMicrobatch
    """The number of each among those of the global batch, an int32 scalar on its group."""
    steps: list[jax.Array]
    """The number of the step on each group, an int32 scalar."""

    def each(self, function: Callable[..., Any]) -> PerMicrobatch:
        """`function(i, j, rows, step, index)` of microbatch j of group i, for all of them."""
        results: PerMicrobatch = [[] for _ in self.rows]
        # Group after group for each microbatch, so that all devices have work while the host dispatches.
        for j in range(self.shares.most):
            for i, rows in enumerate(self.rows):
                if j < len(rows):
                    results[i].append(function(i, j, rows[j], self.steps[i], self.indices[i][j]))
        return results


def turns(batch: PlacedBatch, devices: DeviceGroups, step: int) -> Iterator[Turn]:
    """The microbatches of a batch, those of a device in the order in which it computes them."""
    shares = devices.shares(batch.plan)
    steps = [group.put(np.int32(step)) for group in devices.groups]
    sizes = [len(shares.terms(group.index)) for group in devices.groups]
    for turn in range(batch.plan.count // shares.count):
        cuts = [slice(turn * size, (turn + 1) * size) for size in sizes]
        rows = [of_group[cut] for of_group, cut in zip(batch.microbatches, cuts, strict=True)]
        yield Turn(shares, rows, [n[cut] for n, cut in zip(batch.indices, cuts, strict=True)], steps)


class LayerwiseForward:
    """The forward pass through the layers.

    Args:
        parts: of the loss.
        batch: the shapes of a microbatch.
        saving: for each place of the period a layer that hands values on to its derivative; none of them does without.
    """

    def __init__(self, parts: Parts, batch: Batch, saving: Sequence[SavingLayer] | None = None):
        self.parts, functions, stream = parts, parts.functions, parts.stream(batch)
        self._saves = saving is not None
        self.enter = parts.compile(functions.enter, parts.enter, (batch, SCALAR, SCALAR), "stream")
        arguments = (stream, batch, SCALAR, SCALAR, SCALAR)
        returns = "stream" if saving is None else ("stream", "kept")
        self.layers = [
            parts.compile(functions.layer(place) if saving is None else saving[place].forward, part, arguments, returns)
            for place, part in enumerate(parts.places)
        ]

    def __call__(self, params: Params, turn: Turn, kept: list[PerMicrobatch] | None = None) -> PerMicrobatch:
        """The streams after the last layer.

        Args:
            params: all parameters, as the state has them.
            turn: the microbatches.
            kept: gets for each layer what its derivative is given: the streams before it, in a tuple, with the values
                that it hands on.
        """
        parts, queue = self.parts, Queue()
        gathered = parts.enter.gather(params, parts.row(0))
        streams = turn.each(lambda i, _, rows, step, index: self.enter(i, gathered[i], rows, step, index))
        for layer in range(parts.num_layers):
            before, results = streams, self._layer(params, turn, layer, streams)
            streams = _of_each(lambda result: result[0], results) if self._saves else results
            if kept is not None:
                handed_on = _of_each(lambda result: result[1:] if self._saves else (), results)
                kept.append(_of_each(lambda x, more: (x, *more), before, handed_on))
            queue.push(streams)
        return streams

    def _layer(self, params: Params, turn: Turn, layer: int, streams: PerMicrobatch) -> PerMicrobatch:
        parts, run = self.parts, self.layers[layer % self.parts.period]
        gathered, number = parts.of_layer(layer).gather(params, parts.row(layer)), parts.number(layer)
        return turn.each(
            lambda i, j, rows, step, index: run(i, gathered[i], streams[i][j], rows, number[i], step, index)
        )


def _of_each(function: Callable[..., Any], *values: PerMicrobatch) -> PerMicrobatch:
    return [[function(*each) for each in zip(*of_group, strict=True)] for of_group in zip(*values, strict=True)]


class Queue:
    """Keeps the host from running ahead of the devices by more than a few layers."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def push(self, results: PerMicrobatch) -> None:
        """Takes what a layer computes, and waits until the device is done with an earlier one."""
        # One array of each group tells of all; the others are free to be consumed.
        self._waiting.append([group[-1] for group in results])
        if len(self._waiting) == LAYERS_AT_ONCE:
            jax.block_until_ready(self._waiting.popleft())
