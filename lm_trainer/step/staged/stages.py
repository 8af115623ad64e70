"""The stages of a loss on the devices: their parameters, their order, and their executables for microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.step.dispatch.device_groups import DeviceGroups, ModelParallelGroup
from lm_trainer.step.dispatch.microbatches import Microbatch, Microbatches, MicrobatchGroup
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.staged.stage import Stage, StageLabels
from lm_trainer.step.staged.stage_functions import SCALAR, StageFunctions
from lm_trainer.step.staged.stage_sharing import put_on_group, share_stage, stream_on_group
from lm_trainer.step.state.model_def import Params

LAYERS_AT_ONCE = 2
"""Layers in the queue of a device, the one that is computed among them: arrays take memory once they are queued."""


class StageAt(NamedTuple):
    """A stage in the order in which microbatches go through them."""

    place: int
    """Position of its programs and parameters among `Stages.kinds`."""
    row: jax.Array
    """The position of a layer among those of its place, an int32 scalar on all devices; 0 of what is no layer."""
    numbers: list[Any]
    """The number of a layer on each device group, an int32 scalar; None of what is no layer."""


class Ready(NamedTuple):
    """All parameters, as the stages take them."""

    params: Params
    """As the state has them."""
    whole: list[Params] | None
    """On each device group, where there is one stage, for which they are gathered once; None where there are more."""


class Stages:
    """The stages of a loss, and the parameters that each reads.

    Args:
        functions: of the stages, in their order; those of layers take turns.
        shapes: of all parameters.
        trainable: the parameters that have a gradient.
        devices: where they are computed.
        sums: as in `StageLabels`.
        prefix: likewise.
    """

    def __init__(
        self,
        functions: Sequence[StageFunctions],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        trainable: Collection[str],
        devices: DeviceGroups,
        *,
        sums: str = "sums",
        prefix: str = "",
    ):
        self.devices, alone = devices, len(functions) == 1
        self.kinds = [
            Stage(devices, stage, shapes, trainable, StageLabels(stage.name, sums, prefix, alone))
            for stage in functions
        ]

    @property
    def last(self) -> Stage:
        """The stage that has the loss."""
        return self.kinds[-1]

    # Sent once: numbers from the host would be transfers of every step.
    @cached_property
    def order(self) -> list[StageAt]:
        """The stages as microbatches go through them."""
        found: list[tuple[int, int, int | None]] = []
        for place, kind in enumerate(self.kinds):
            layers = kind.functions.layers
            found += [(place, 0, None)] if layers is None else [(place, row, n) for row, n in enumerate(layers)]
        last, groups = len(self.kinds) - 1, self.devices.groups
        found.sort(key=lambda at: (at[0] == last, -1 if at[2] is None else at[2]))
        rows = {row: replicate(np.int32(row), self.devices.sharding.mesh) for row in {row for _, row, _ in found}}
        return [
            StageAt(place, rows[row], [None if n is None else group.put(np.int32(n)) for group in groups])
            for place, row, n in found
        ]

    def ready(self, params: Params) -> Ready:
        """All parameters as `gather` takes them, from those of the state."""
        return Ready(params, self.last.gather(params, self.order[0].row) if len(self.order) == 1 else None)

    def gather(self, ready: Ready, at: StageAt) -> list[Params]:
        """The parameters of a stage as each local group computes with them."""
        return self.kinds[at.place].gather(ready.params, at.row) if ready.whole is None else ready.whole

    def compile_forward(self, place: int, batch: Batch) -> PerGroupExecutable:
        """The forward pass of the stages at a place: `(params, stream, rows, number, step, index)`.

        Args:
            place: position among `kinds`.
            batch: the shapes of a microbatch.
        """
        kind = self.kinds[place]
        program = Program(kind.labels.forward, None, "activations of layers", grows=True, overlaps=True)
        return self._compile(
            program, kind.functions.forward, kind, self._arguments(place, batch), ("stream", "nothing")
        )

    def compile_gradient(self, place: int, batch: Batch) -> PerGroupExecutable:
        """The derivative: `(params, stream, handed on, rows, number, derivative, step, index)`; arguments as there."""
        kind = self.kinds[place]
        stream, *others = self._arguments(place, batch)
        rows, number, step, index = others
        handed_on = () if kind is self.last else self._forward_shapes(place, (stream, *others))[1]
        derivative = None if kind is self.last else self._stream(batch)
        # What entered the stage is not needed again: its derivative takes its memory.
        donated = () if stream is None else (1,)
        returns = ("nothing" if stream is None else "stream", "sums")
        arguments = (stream, handed_on, rows, number, derivative, step, index)
        program = Program(kind.labels.gradient, None, kind.labels.gradients, grows=True, overlaps=True)
        return self._compile(program, kind.functions.gradient, kind, arguments, returns, donated=donated)

    def compile_losses(self, batch: Batch) -> PerGroupExecutable:
        """The sums that the loss reports, from what enters the last stage; otherwise as a forward pass."""
        arguments = self._arguments(len(self.kinds) - 1, batch)
        program = Program(self.last.labels.forward, None, "sums", grows=True, overlaps=True)
        return self._compile(program, self.last.functions.losses, self.last, arguments, "scalars")

    def _arguments(self, place: int, batch: Batch) -> tuple[Any, ...]:
        """The shapes of the arguments of a forward pass after the parameters."""
        number = SCALAR if self.kinds[place].layered else None
        return (self._stream(batch) if place else None, batch, number, SCALAR, SCALAR)

    def _stream(self, batch: Batch) -> Any:
        """The shapes of what goes from stage to stage for a microbatch like `batch`."""
        return self._forward_shapes(0, (None, batch, None, SCALAR, SCALAR))[0]

    def _forward_shapes(self, place: int, arguments: tuple[Any, ...]) -> Any:
        kind = self.kinds[place]
        forward = self._shared(kind.functions.forward, kind, arguments, ("stream", "nothing"))
        # Another function, since JAX would keep this trace for the compilation, without the names of arguments.
        return jax.eval_shape(lambda *given: forward(*given), kind.shapes(), *arguments)

    def _shared(self, function: Any, kind: Stage, arguments: Sequence[Any], returns: Any) -> Callable[..., Any]:
        if kind.functions.divided:
            return function
        return share_stage(function, kind, self.devices.groups[0].mesh, arguments, returns)

    def _compile(
        self,
        program: Program,
        function: Any,
        kind: Stage,
        arguments: Sequence[Any],
        returns: Any,
        *,
        donated: Sequence[int] = (),
    ) -> PerGroupExecutable:
        """An executable on each group of `function(params, *arguments)`.

        Args:
            program: without its function.
            function: what to compute.
            kind: whose parameters it reads.
            arguments: the shapes of its other arguments, with streams as `_stream` gives them.
            returns: as for `share_stage`.
            donated: the arguments that it consumes.
        """

        def on_group(group: ModelParallelGroup) -> tuple[Any, ...]:
            return kind.on(group), *put_on_group(arguments, group.mesh)

        def results(group: ModelParallelGroup) -> Any:
            kinds: dict[str, Any] = dict.fromkeys(("scalars", "nothing"), group.sharding())
            kinds |= {"stream": stream_on_group(group.mesh), "sums": kind.sums_on(group)}
            return jax.tree.map(lambda name: kinds[name], returns)

        shared = self._shared(function, kind, arguments, returns)
        executable = PerGroupExecutable(shared, self.devices.groups, results, donated=donated, program=program)
        executable.compile_for(on_group)
        return executable


class Passed(NamedTuple):
    """The values of a microbatch from before a stage and from inside of it, which its derivative is given."""

    stream: Any
    """The stream before the stage; None before the first one."""
    handed_on: Any
    """Values that the stage hands on."""


@dataclass(frozen=True)
class StagedForward:
    """The forward pass of microbatches through all stages but the last one.

    Attributes:
        stages: of the loss.
        programs: by the position of a stage among `Stages.kinds`.
    """

    stages: Stages
    programs: list[PerGroupExecutable]

    @classmethod
    def compile(cls, stages: Stages, batch: Batch) -> StagedForward:
        """Compiles the programs for microbatches like `batch`."""
        return cls(stages, [stages.compile_forward(place, batch) for place in range(len(stages.kinds) - 1)])

    def __call__(self, ready: Ready, group: MicrobatchGroup, kept: list[Microbatches[Passed]] | None = None) -> Any:
        """The `Microbatches` of what enters the last stage.

        Args:
            ready: all parameters, as `Stages.ready` gives them.
            group: the microbatches.
            kept: gets for each stage but the last one what its derivative is given.
        """
        streams: Microbatches[Any] = group.microbatches.map(lambda _: None)
        queue = Queue()
        for at in self.stages.order[:-1]:
            results = self._through(ready, group, at, streams)
            if kept is not None:
                kept.append(streams.map(lambda stream, result: Passed(stream, result[1]), results))
            streams = results.map(lambda result: result[0])
            if self.stages.kinds[at.place].layered:
                queue.push(streams)
        return streams

    # A function of its own, with which what it gathered goes.
    def _through(
        self, ready: Ready, group: MicrobatchGroup, at: StageAt, streams: Microbatches[Any]
    ) -> Microbatches[Any]:
        gathered, run = self.stages.gather(ready, at), self.programs[at.place]

        def one(microbatch: Microbatch, stream: Any) -> Any:
            i, rows, step, index = microbatch
            return run(i, gathered[i], stream, rows, at.numbers[i], step, index)

        return group.microbatches.map(one, streams)


class Queue:
    """Keeps the host from running ahead of the devices by more than a few layers."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def push(self, results: Microbatches[Any]) -> None:
        """Takes what a layer computes, and waits until the device is done with an earlier one."""
        # One array of each group tells of all; the others are free to be consumed.
        self._waiting.append(results.lasts())
        if len(self._waiting) == LAYERS_AT_ONCE:
            jax.block_until_ready(self._waiting.popleft())
