"""The stages of a loss on the devices: their parameters, their execution order, and their compiled programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
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
"""Layers in a device's queue, including the one being computed: arrays take memory once they are queued."""


class StageCall(NamedTuple):
    """One stage in execution order."""

    kind: int
    """Index of its programs and parameters in `Stages.kinds`."""
    row: jax.Array
    """Index of the layer in the parameters stacked for its kind, an int32 scalar on all devices; 0 if not a layer."""
    numbers: list[jax.Array | None]
    """Number of the layer on each device group, an int32 scalar; None if not a layer."""


class Ready(NamedTuple):
    """All parameters, in the form that the stages take."""

    params: Params
    """As stored in the state."""
    gathered: list[Params] | None
    """Gathered once for each device group if there is only one stage; None if there are several."""


class Stages:
    """The stages of a loss, and the parameters each of them reads.

    Args:
        functions: functions of the stages, in execution order; layers of several kinds alternate.
        shapes: shapes of all parameters.
        trainable: parameters that have a gradient.
        devices: devices that compute the stages.
        sums: as in `StageLabels`.
        prefix: as in `StageLabels`.
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
        self.devices, single = devices, len(functions) == 1
        self.kinds = [
            Stage(devices, stage, shapes, trainable, StageLabels(stage.name, sums, prefix, single))
            for stage in functions
        ]

    @property
    def last(self) -> Stage:
        """The stage that computes the loss."""
        return self.kinds[-1]

    # Sent once: scalars from the host would be transferred in every step.
    @cached_property
    def order(self) -> list[StageCall]:
        """The stages in execution order."""
        calls: list[tuple[int, int, int | None]] = []
        for index, kind in enumerate(self.kinds):
            layers = kind.functions.layers
            calls += [(index, 0, None)] if layers is None else [(index, row, n) for row, n in enumerate(layers)]
        last, groups = len(self.kinds) - 1, self.devices.groups
        calls.sort(key=lambda call: (call[0] == last, -1 if call[2] is None else call[2]))
        rows = {row: replicate(np.int32(row), self.devices.sharding.mesh) for row in {row for _, row, _ in calls}}
        return [
            StageCall(index, rows[row], [None if n is None else group.put(np.int32(n)) for group in groups])
            for index, row, n in calls
        ]

    def ready(self, params: Params) -> Ready:
        """Prepares the parameters of the state for `gather`."""
        return Ready(params, self.last.gather(params, self.order[0].row) if len(self.order) == 1 else None)

    def gather(self, ready: Ready, call: StageCall) -> list[Params]:
        """The parameters of a stage, gathered for computation on each local group."""
        return self.kinds[call.kind].gather(ready.params, call.row) if ready.gathered is None else ready.gathered

    def compile_forward(self, index: int, batch: Batch) -> PerGroupExecutable:
        """The forward pass of one kind of stage: `(params, stream, rows, number, step, index)`.

        Args:
            index: position in `kinds`.
            batch: shapes of a microbatch.
        """
        kind = self.kinds[index]
        program = Program(kind.labels.forward, None, "activations of layers", grows=True, overlaps=True)
        return self._compile(
            program, kind.functions.forward, kind, self._arguments(index, batch), ("stream", "nothing")
        )

    def compile_gradient(self, index: int, batch: Batch) -> PerGroupExecutable:
        """The backward pass: `(params, stream, residuals, rows, number, derivative, step, index)`.

        Args:
            index: position in `kinds`.
            batch: shapes of a microbatch.
        """
        kind = self.kinds[index]
        stream, *others = self._arguments(index, batch)
        rows, number, step, microbatch = others
        residuals = () if kind is self.last else self._forward_shapes(index, (stream, *others))[1]
        derivative = None if kind is self.last else self._stream(batch)
        # The input of the stage is not needed afterwards: its derivative reuses the memory.
        donated = () if stream is None else (1,)
        returns = ("nothing" if stream is None else "stream", "sums")
        arguments = (stream, residuals, rows, number, derivative, step, microbatch)
        program = Program(kind.labels.gradient, None, kind.labels.gradients, grows=True, overlaps=True)
        return self._compile(program, kind.functions.gradient, kind, arguments, returns, donated=donated)

    def compile_losses(self, batch: Batch) -> PerGroupExecutable:
        """The sums the loss reports, computed from the input of the last stage; otherwise as a forward pass."""
        arguments = self._arguments(len(self.kinds) - 1, batch)
        program = Program(self.last.labels.forward, None, "sums", grows=True, overlaps=True)
        return self._compile(program, self.last.functions.losses, self.last, arguments, "scalars")

    def _arguments(self, index: int, batch: Batch) -> tuple[PyTree, ...]:
        """Shapes of the arguments of a forward pass after the parameters."""
        number = SCALAR if self.kinds[index].layered else None
        return (self._stream(batch) if index else None, batch, number, SCALAR, SCALAR)

    def _stream(self, batch: Batch) -> PyTree:
        """Shapes of the values passed from stage to stage for a microbatch like `batch`."""
        return self._forward_shapes(0, (None, batch, None, SCALAR, SCALAR))[0]

    def _forward_shapes(self, index: int, arguments: tuple[PyTree, ...]) -> PyTree:
        kind = self.kinds[index]
        forward = self._shared(kind.functions.forward, kind, arguments, ("stream", "nothing"))
        # Wrapped in another function: JAX would reuse this trace, without names of arguments, for the compilation.
        return jax.eval_shape(lambda *args: forward(*args), kind.shapes(), *arguments)

    def _shared(
        self, function: Callable[..., PyTree] | None, kind: Stage, arguments: Sequence[PyTree], returns: PyTree
    ) -> Callable[..., PyTree]:
        assert function is not None
        if kind.functions.divided:
            return function
        return share_stage(function, kind, self.devices.groups[0].mesh, arguments, returns)

    def _compile(
        self,
        program: Program,
        function: Callable[..., PyTree] | None,
        kind: Stage,
        arguments: Sequence[PyTree],
        returns: PyTree,
        *,
        donated: Sequence[int] = (),
    ) -> PerGroupExecutable:
        """Compiles `function(params, *arguments)` for each group.

        Args:
            program: description of the program, without its function.
            function: function to compile.
            kind: stage whose parameters the function reads.
            arguments: shapes of the other arguments, with streams as returned by `_stream`.
            returns: as for `share_stage`.
            donated: positions of the arguments that the program consumes.
        """

        def on_group(group: ModelParallelGroup) -> tuple[PyTree, ...]:
            return kind.on(group), *put_on_group(arguments, group.mesh)

        def results(group: ModelParallelGroup) -> PyTree:
            kinds: dict[str, PyTree] = dict.fromkeys(("scalars", "nothing"), group.sharding())
            kinds |= {"stream": stream_on_group(group.mesh), "sums": kind.sums_on(group)}
            return jax.tree.map(lambda name: kinds[name], returns)

        shared = self._shared(function, kind, arguments, returns)
        executable = PerGroupExecutable(shared, self.devices.groups, results, donated=donated, program=program)
        executable.compile_for(on_group)
        return executable


class SavedForBackward(NamedTuple):
    """Values of a microbatch the forward pass of a stage saves for its backward pass."""

    stream: PyTree
    """The input of the stage; None for the first stage."""
    residuals: PyTree
    """Values from inside the stage."""


@dataclass(frozen=True)
class StagedForward:
    """The forward pass of microbatches through all stages except the last.

    Attributes:
        stages: stages of the loss.
        programs: one program for each kind of stage except the last, in the order of `Stages.kinds`.
    """

    stages: Stages
    programs: list[PerGroupExecutable]

    @classmethod
    def compile(cls, stages: Stages, batch: Batch) -> StagedForward:
        """Compiles the programs for microbatches like `batch`."""
        return cls(stages, [stages.compile_forward(index, batch) for index in range(len(stages.kinds) - 1)])

    def __call__(
        self, ready: Ready, group: MicrobatchGroup, saved: list[Microbatches[SavedForBackward]] | None = None
    ) -> Microbatches[PyTree]:
        """Computes the inputs of the last stage for each microbatch.

        Args:
            ready: all parameters, as returned by `Stages.ready`.
            group: the microbatches.
            saved: receives the values for the backward pass of each stage except the last.
        """
        streams: Microbatches[PyTree] = group.microbatches.map(lambda _: None)
        queue = Queue()
        for call in self.stages.order[:-1]:
            results = self._through(ready, group, call, streams)
            if saved is not None:
                saved.append(streams.map(lambda stream, result: SavedForBackward(stream, result[1]), results))
            streams = results.map(lambda result: result[0])
            if self.stages.kinds[call.kind].layered:
                queue.push(streams)
        return streams

    # A separate function, so the gathered parameters are freed when it returns.
    def _through(
        self, ready: Ready, group: MicrobatchGroup, call: StageCall, streams: Microbatches[PyTree]
    ) -> Microbatches[PyTree]:
        gathered, run = self.stages.gather(ready, call), self.programs[call.kind]

        def one(microbatch: Microbatch, stream: PyTree) -> PyTree:
            i, rows, step, index = microbatch
            return run(i, gathered[i], stream, rows, call.numbers[i], step, index)

        return group.microbatches.map(one, streams)


class Queue:
    """Keeps the host from running more than a few layers ahead of the devices."""

    def __init__(self) -> None:
        self._waiting: deque[list[PyTree]] = deque()

    def push(self, results: Microbatches[PyTree]) -> None:
        """Adds the results of a layer, and waits until the device has finished an earlier one."""
        # Waiting for one array of each group is enough; the others may be donated.
        self._waiting.append(results.lasts())
        if len(self._waiting) == LAYERS_AT_ONCE:
            jax.block_until_ready(self._waiting.popleft())
