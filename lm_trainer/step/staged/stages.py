"""Stages of a loss on the devices: their parameters, their order of execution, and their compiled programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.step.dispatch.device_groups import DeviceGroups, ModelParallelGroup
from lm_trainer.step.dispatch.layer_queue import LayerQueue
from lm_trainer.step.dispatch.mesh_executable import Exchange, MeshExecutable, MicrobatchExecutable, ProgramsDiffer
from lm_trainer.step.dispatch.mesh_group import MeshWide, Role, Signature
from lm_trainer.step.dispatch.microbatches import Microbatch, Microbatches, MicrobatchGroup
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.staged.neighbours import Neighbours, find_neighbours
from lm_trainer.step.staged.stage import Stage, StageFunction, StageLabels
from lm_trainer.step.staged.stage_functions import SCALAR, StageFunctions
from lm_trainer.step.staged.stage_sharing import share_stage, stream_shardings, with_group_shardings
from lm_trainer.step.state.model_def import Params

logger = logging.getLogger(__name__)


class Overlap(NamedTuple):
    """Exchanges that overlap with the computation of a microbatch."""

    exchanges: Sequence[Exchange]
    alone: PerGroupExecutable
    """The computation without the exchanges, compiled for one device."""


_FORWARD: tuple[Role, ...] = ("own", "own", "shared", "shared", "own")
"""Roles of the arguments of a forward pass, except the parameters."""
_GRADIENT: tuple[Role, ...] = ("own", "own", "own", "shared", "own", "shared", "own")


class StageCall(NamedTuple):
    """One stage, in the order of execution."""

    kind: int
    """Index of the stage's programs and parameters in `Stages.kinds`."""
    row: jax.Array
    """Index of the layer in the parameters stacked for its kind, an int32 scalar on all devices; 0 if not a layer."""
    numbers: list[jax.Array | None]
    """Number of the layer on each device group, an int32 scalar; None if not a layer."""


class PreparedParams(NamedTuple):
    """All parameters, in the form in which the stages take them."""

    params: Params
    """Parameters as stored in the state."""
    gathered: list[Params] | None
    """Parameters gathered once for each device group, if there is only one stage; None if there are several."""


class Stages:
    """Stages of a loss, and the parameters that each of them reads.

    Args:
        functions: functions of the stages in order of execution, one for each kind of layer.
        shapes: shapes of all parameters.
        trainable: names of the parameters that have a gradient.
        devices: devices that compute the stages.
        sums: as in `StageLabels`.
        prefix: as in `StageLabels`.
    """

    def __init__(
        self,
        functions: Sequence[StageFunctions],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        trainable: Collection[str],
        devices: DeviceGroups | MeshWide,
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
        """Stage that computes the loss."""
        return self.kinds[-1]

    @cached_property
    def _sequence(self) -> list[tuple[int, int, int | None]]:
        """Kind of each stage in order of execution, its row in the stacked parameters, and the number of the layer."""
        calls: list[tuple[int, int, int | None]] = []
        for run in self._runs:
            if self.kinds[run[0]].layered:
                layers = [(index, self.kinds[index].functions.layers or ()) for index in run]
                numbered = sorted((n, index, row) for index, numbers in layers for row, n in enumerate(numbers))
                calls += [(index, row, n) for n, index, row in numbered]
            else:
                calls.append((run[0], 0, None))
        return calls

    # Cached, because scalars from the host would otherwise be transferred in every step.
    @cached_property
    def order(self) -> list[StageCall]:
        """The stages in order of execution."""
        calls, groups = self._sequence, self.devices.groups
        rows = {row: replicate(np.int32(row), self.devices.sharding.mesh) for row in {row for _, row, _ in calls}}
        return [
            StageCall(index, rows[row], [None if n is None else group.put(np.int32(n)) for group in groups])
            for index, row, n in calls
        ]

    def prepare_params(self, params: Params) -> PreparedParams:
        """Prepares the parameters of the state for `gather`."""
        single = len(self.order) == 1
        return PreparedParams(params, self.last.gradient.params.gather(params, self.order[0].row) if single else None)

    def gather(self, ready: PreparedParams, call: StageCall, *, gradient: bool = False) -> list[Params]:
        """Returns what the forward or backward pass of a stage reads, gathered for computation on each local group."""
        function = self.kinds[call.kind].gradient if gradient else self.kinds[call.kind].forward
        return function.params.gather(ready.params, call.row) if ready.gathered is None else ready.gathered

    @cached_property
    def _runs(self) -> list[list[int]]:
        """Positions in `kinds` of consecutive kinds of layers, or of one other stage."""
        runs = list[list[int]]()
        for index, kind in enumerate(self.kinds):
            if kind.layered and self.kinds[index - 1].layered:
                runs[-1].append(index)
            else:
                runs.append([index])
        return runs

    def _run_of(self, index: int) -> list[int]:
        return next(run for run in self._runs if index in run)

    def is_differentiated(self, index: int) -> bool:
        """Returns true if a stage has a backward pass: if it, or a stage before it, has trained parameters."""
        return any(kind.trained for kind in self.kinds[: self._run_of(index)[-1] + 1])

    @cached_property
    def above(self) -> Neighbours:
        """The layer above each layer, with which the layer overlaps its exchange in the forward pass."""
        return self._find_neighbours(1)

    @cached_property
    def below_and_above(self) -> Neighbours:
        """The layers below and above each layer, with which the layer overlaps its exchanges in the backward pass."""
        return self._find_neighbours(-1, 1)

    def _find_neighbours(self, *offsets: int) -> Neighbours:
        order = [kind for kind, _, _ in self._sequence]
        return find_neighbours(order, [self.kinds[kind].layered for kind in order], *offsets)

    def compile_forward(self, index: int, batch: Batch, overlap: Overlap | None = None) -> MicrobatchExecutable:
        """Compiles the forward pass of one kind of stage: `(params, stream, rows, number, step, index)`.

        Args:
            index: position in `kinds`.
            batch: shapes of a microbatch.
            overlap: exchanges that overlap with the computation.
        """
        kind = self.kinds[index]
        program = Program(kind.labels.forward, None, "activations of layers", grows=True, overlaps=True)
        signature = Signature(self._argument_shapes(index, batch), _FORWARD, ("stream", "nothing"))
        return self._compile(program, kind.forward, kind, signature, overlap)

    def compile_gradient(self, index: int, batch: Batch, overlap: Overlap | None = None) -> MicrobatchExecutable:
        """Compiles the backward pass: `(params, stream, residuals, rows, number, derivative, step, index)`.

        Args:
            index: position in `kinds`.
            batch: shapes of a microbatch.
            overlap: exchanges that overlap with the computation.
        """
        kind = self.kinds[index]
        arguments = stream, rows, number, step, microbatch = self._argument_shapes(index, batch)
        residuals = () if kind is self.last else self._forward_shapes(index, arguments)[1]
        derivative = None if kind is self.last else self._output_shapes(index, batch)
        # The input of the stage is not needed afterwards, so its derivative reuses the memory.
        donated = () if stream is None or kind.functions.shares_input else (1,)
        returns = ("nothing" if stream is None else "stream", "sums")
        program = Program(kind.labels.gradient, None, kind.labels.gradients, grows=True, overlaps=True)
        all_arguments = (stream, residuals, rows, number, derivative, step, microbatch)
        signature = Signature(all_arguments, _GRADIENT, returns, donated)
        return self._compile(program, kind.gradient, kind, signature, overlap)

    def compile_overlapped(
        self,
        programs: Sequence[MicrobatchExecutable | None],
        compile_with: Callable[[int, PerGroupExecutable, tuple[int, ...]], MicrobatchExecutable],
        neighbours: Neighbours,
    ) -> dict[int, MicrobatchExecutable]:
        """Compiles programs of layers that also exchange arrays, except for layers whose results would differ.

        Args:
            programs: the same programs without exchanges, by position in `kinds`.
            compile_with: compiles a program with its exchanges, given its position, the computation without exchanges,
                and the positions of its neighbours.
            neighbours: layers with which each layer exchanges arrays.

        Returns:
            Position in `kinds` -> program; empty if each device has a separate program.
        """
        compiled = dict[int, MicrobatchExecutable]()
        for index, kinds in sorted(neighbours.kinds.items()):
            program = programs[index]
            if isinstance(program, MeshExecutable):
                try:
                    compiled[index] = compile_with(index, program.alone, kinds)
                except ProgramsDiffer as error:
                    logger.warning("%s: compiled differently, so the layer runs without them", error)
        return compiled

    def compile_losses(self, batch: Batch) -> MicrobatchExecutable:
        """Compiles the sums that the loss reports, from the input of the last stage; otherwise like a forward pass."""
        signature = Signature(self._argument_shapes(len(self.kinds) - 1, batch), _FORWARD, "scalars")
        program = Program(self.last.labels.forward, None, "sums", grows=True, overlaps=True)
        return self._compile(program, self.last.losses, self.last, signature)

    def _argument_shapes(self, index: int, batch: Batch) -> tuple[PyTree, ...]:
        """Returns the shapes of the arguments of a forward pass, except the parameters."""
        number = SCALAR if self.kinds[index].layered else None
        return (self._input_shapes(index, batch), batch, number, SCALAR, SCALAR)

    def _input_shapes(self, index: int, batch: Batch) -> PyTree:
        """Returns the shapes of the input of a stage for a microbatch like `batch`; None for the first stage."""
        return self._output_shapes(index - 1, batch) if index else None

    def _output_shapes(self, index: int, batch: Batch) -> PyTree:
        """Returns the shapes of the output of a stage, with the parts of its input that it shares."""
        if self.kinds[index].layered:
            return self._input_shapes(self._run_of(index)[0], batch)
        return self._forward_shapes(index, self._argument_shapes(index, batch))[0]

    def _forward_shapes(self, index: int, arguments: tuple[PyTree, ...]) -> PyTree:
        kind = self.kinds[index]
        forward = self._share_function(kind.forward, kind, arguments, ("stream", "nothing"))
        # Wrapped in another function, because JAX would reuse this trace, which has no argument names, for the
        # compilation.
        return jax.eval_shape(lambda *args: forward(*args), kind.forward.params.shapes(), *arguments)

    def _share_function(
        self, function: StageFunction, kind: Stage, arguments: Sequence[PyTree], returns: PyTree
    ) -> Callable[..., PyTree]:
        assert function.call is not None
        if kind.functions.divided:
            return function.call
        return share_stage(function, kind, self._alone[0].mesh, arguments, returns)

    def _compile(
        self,
        program: Program,
        function: StageFunction,
        kind: Stage,
        signature: Signature,
        overlap: Overlap | None = None,
    ) -> MicrobatchExecutable:
        """Compiles `function(params, *arguments)`.

        Args:
            program: description of the program, without its function.
            function: function to compile.
            kind: stage that the function belongs to.
            signature: arguments and results of the function.
            overlap: exchanges that overlap with the computation.
        """
        assert function.call is not None
        alone = self._compile_alone(program, function, kind, signature) if overlap is None else overlap.alone
        if not isinstance(self.devices, MeshWide):
            return alone
        (group,) = self.devices.groups
        exchanges = () if overlap is None else overlap.exchanges
        wide = MeshExecutable(function.call, group, signature, program, exchanges)
        wide.compile_for(function.params.shapes_on_group(group), alone)
        return wide

    def _compile_alone(
        self, program: Program, function: StageFunction, kind: Stage, signature: Signature
    ) -> PerGroupExecutable:
        """Compiles the computation for each group of devices, or for one device if one program serves all devices."""
        arguments, returns = signature.arguments, signature.returns

        def on_group(group: ModelParallelGroup) -> tuple[PyTree, ...]:
            return function.params.shapes_on_group(group), *with_group_shardings(arguments, group.mesh)

        def result_shardings(group: ModelParallelGroup) -> PyTree:
            kinds: dict[str, PyTree] = dict.fromkeys(("scalars", "nothing"), group.sharding())
            kinds |= {"stream": stream_shardings(group.mesh), "sums": kind.sum_shardings_on(group)}
            return jax.tree.map(lambda name: kinds[name], returns)

        shared = self._share_function(function, kind, arguments, returns)
        executable = PerGroupExecutable(
            shared, self._alone, result_shardings, donated=signature.donated, program=program
        )
        executable.compile_for(on_group)
        return executable

    @property
    def _alone(self) -> Sequence[ModelParallelGroup]:
        """Groups of devices for which the computation of a microbatch is compiled without other devices."""
        return self.devices.devices.groups[:1] if isinstance(self.devices, MeshWide) else self.devices.groups


class SavedForBackward(NamedTuple):
    """Activations of one microbatch that the forward pass of a stage saves for its backward pass."""

    stream: PyTree
    """Input of the stage; None for the first stage."""
    residuals: PyTree
    """Values from inside the stage."""


class FirstExchange:
    """Exchanges of a layer, which overlap with its first microbatch.

    Args:
        program: program that computes a microbatch together with the exchanges.
        arguments: arguments of the exchanges, which are dropped when the program runs.
    """

    def __init__(self, program: MicrobatchExecutable, arguments: tuple[PyTree, ...]):
        self._program, self._arguments = program, arguments
        self._results: list[PyTree] = []
        self._started = False

    def run_first(self, run: MicrobatchExecutable, group: int, arguments: tuple[PyTree, ...]) -> PyTree:
        """Returns the results for a microbatch: from the program with exchanges the first time, later from `run`."""
        if self._started:
            return run(group, *arguments)
        exchanged, self._arguments, self._started = self._arguments, (), True
        results, *self._results = self._program(group, *arguments, *exchanged)
        return results

    def take_results(self) -> list[PyTree]:
        """Returns the results of the exchanges once, and keeps no reference to them."""
        results, self._results = self._results, []
        return results


@dataclass(frozen=True)
class StagedForward:
    """Forward pass of microbatches through all stages except the last.

    Attributes:
        stages: stages of the loss.
        programs: one program for each kind of stage except the last, in the order of `Stages.kinds`.
        gathering: programs of layers that also gather the next layer, by position in `Stages.kinds`.
    """

    stages: Stages
    programs: list[MicrobatchExecutable]
    gathering: Mapping[int, MicrobatchExecutable] = field(default_factory=dict)

    @classmethod
    def compile(cls, stages: Stages, batch: Batch) -> StagedForward:
        """Compiles the programs for microbatches like `batch`."""
        programs = [stages.compile_forward(index, batch) for index in range(len(stages.kinds) - 1)]

        def compile_forward(index: int, alone: PerGroupExecutable, neighbours: tuple[int, ...]) -> MicrobatchExecutable:
            (above,) = (stages.kinds[neighbour] for neighbour in neighbours)
            return stages.compile_forward(index, batch, Overlap([above.forward.params.gather_exchange()], alone))

        gathering = stages.compile_overlapped(programs, compile_forward, stages.above)
        return cls(stages, programs, gathering)

    def __call__(
        self, ready: PreparedParams, group: MicrobatchGroup, saved: list[Microbatches[SavedForBackward]] | None = None
    ) -> Microbatches[PyTree]:
        """Computes the input of the last stage for each microbatch.

        Args:
            ready: all parameters, as returned by `Stages.prepare_params`.
            group: microbatches to compute.
            saved: receives the values that each stage with a backward pass saves for it, except the last stage.
        """
        streams: Microbatches[PyTree] = group.microbatches.map(lambda _: None)
        queue, stages = LayerQueue(self.stages.devices.layers_at_once), self.stages
        gathered: list[Params] | None = None
        for position, (call, following) in enumerate(pairwise(stages.order)):
            gathered = stages.gather(ready, call) if gathered is None else gathered
            overlaps = call.kind in self.gathering and position in stages.above.positions
            results, gathered = self._run_stage(ready, group, call, streams, gathered, following if overlaps else None)
            if saved is not None and stages.is_differentiated(call.kind):
                saved.append(streams.map(lambda stream, result: SavedForBackward(stream, result[1]), results))
            kind = stages.kinds[call.kind]
            if kind.functions.shares_input:
                streams = results.map(lambda result, stream: _fill_shared(result[0], stream), streams)
            else:
                streams = results.map(lambda result: result[0])
            if kind.layered:
                queue.push(streams)
        return streams

    def _run_stage(
        self,
        ready: PreparedParams,
        group: MicrobatchGroup,
        call: StageCall,
        streams: Microbatches[PyTree],
        gathered: list[Params],
        following: StageCall | None,
    ) -> tuple[Microbatches[PyTree], list[Params] | None]:
        """Returns the results of a stage, and the parameters of stage `following`, which are gathered meanwhile."""
        run, exchange = self.programs[call.kind], None
        if following is not None:
            params = self.stages.kinds[following.kind].forward.params.select(ready.params)
            exchange = FirstExchange(self.gathering[call.kind], (params, following.row))

        def run_microbatch(microbatch: Microbatch, stream: PyTree) -> PyTree:
            i, rows, step, index = microbatch
            arguments = (gathered[i], stream, rows, call.numbers[i], step, index)
            return run(i, *arguments) if exchange is None else exchange.run_first(run, i, arguments)

        return group.microbatches.map(run_microbatch, streams), None if exchange is None else exchange.take_results()


def _fill_shared(output: PyTree, stream: PyTree) -> PyTree:
    """Returns the output of a stage, and the arrays of its input where the output has None."""
    return jax.tree.map(lambda new, old: old if new is None else new, output, stream, is_leaf=lambda x: x is None)
