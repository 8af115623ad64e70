"""Sums of a function over all microbatches, computed stage by stage and added in an order that is the same on every
mesh.

A device holds the parameters of one stage at a time, which a separate program gathers over the batch axes. Each stage
of each microbatch runs its own executable (`PerGroupExecutable`), which is the same for every microbatch, mesh and
layer. The gradients of a stage are added by the fixed tree, first over the microbatches of a device, then over devices.
They are stored sharded before the next stage is computed:

    forward     for each stage but the last:  gather; each microbatch: stream = stage(stream)     saved: its input
    backward    for each stage, reversed:     gather; each microbatch: gradients; add; reduce over devices

With a single stage (the whole model), one program computes the gradient of each microbatch. Split into embedding,
layers and head, the computation needs as much memory as FSDP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.tree_sum import Shares, TreeSum
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.dispatch.layer_queue import LayerQueue
from lm_trainer.step.dispatch.mesh_executable import MicrobatchExecutable
from lm_trainer.step.dispatch.mesh_group import MeshWide
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.microbatches import Microbatch, Microbatches, MicrobatchGroup, microbatch_groups
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.staged.stages import (
    FirstExchange,
    Overlap,
    PreparedParams,
    SavedForBackward,
    StageCall,
    StagedForward,
    Stages,
)
from lm_trainer.step.state.model_def import ModelDef, Params

Tap = Callable[[int, Microbatch, Sums], None]
"""Receives the index of a local device group, a microbatch, and the sums of one of its stages before they are added."""

StagesOf = Callable[[Batch], Sequence[StageFunctions]]
"""Maps the shapes of a microbatch to the stages of a loss, in order of execution."""


class _Programs:
    """Executables of a microbatch.

    Args:
        stages: stages of the loss.
        batch: shapes of the microbatch.
    """

    def __init__(self, stages: Stages, batch: Batch):
        self.stages, self._batch, self.forward = stages, batch, StagedForward.compile(stages, batch)
        self.gradients = [
            stages.compile_gradient(index, batch) if stages.is_differentiated(index) else None
            for index in range(len(stages.kinds))
        ]
        self._exchanging = dict[tuple[bool, Shares | None], dict[int, MicrobatchExecutable]]()

    def programs_with_exchanges(self, shares: Shares) -> Mapping[int, MicrobatchExecutable]:
        """Returns backward passes of layers that also gather the layer below and reduce the gradients of the layer
        above.

        Keys are positions in `Stages.kinds`. Empty if parameters and gradients are exchanged only by separate programs.
        """
        # Sums over several microbatches have a wider dtype than the gradients of a single microbatch. Sums of unequal
        # shares are added in an order that depends on the shares.
        key = (shares.max_terms > 1, None if shares.is_even else shares)
        if key not in self._exchanging:
            self._exchanging[key] = self._compile_with_exchanges(shares)
        return self._exchanging[key]

    def _compile_with_exchanges(self, shares: Shares) -> dict[int, MicrobatchExecutable]:
        stages = self.stages

        def compile_gradient(
            index: int, alone: PerGroupExecutable, neighbours: tuple[int, ...]
        ) -> MicrobatchExecutable:
            below, above = (stages.kinds[neighbour] for neighbour in neighbours)
            overlap = Overlap([below.gradient.params.gather_exchange(), above.reduce_exchange(shares)], alone)
            return stages.compile_gradient(index, self._batch, overlap)

        # The first and the last layer have a neighbour that is not a layer.
        return stages.compile_overlapped(self.gradients, compile_gradient, stages.below_and_above)

    def programs_by_name(self) -> dict[str, MicrobatchExecutable]:
        """Returns all programs by name."""
        names, kinds = [kind.functions.name for kind in self.stages.kinds], range(len(self.stages.kinds))
        if len(kinds) == 1:
            return {names[0]: self.gradients[0]}  # pyright: ignore[reportReturnType] - something is trained
        # The order in which runs have recorded the programs.
        first, *layers, last = kinds
        forward = {names[index]: self.forward.programs[index] for index in (first, *layers)}
        return forward | {
            f"{names[index]} gradient": program
            for index in (*layers, last, first)
            if (program := self.gradients[index]) is not None
        }


class StagedSum:
    """Computes the gradient of every microbatch stage by stage, and adds the results by one fixed tree.

    Args:
        stages_of: stages of the loss.
        model: model whose parameters the stages read.
        trainable: names of the parameters that have a gradient.
        devices: devices that compute the sums.
        sums: name of the sums in plans.
        prefix: prefix of the programs in plans, if there are several stages.
    """

    def __init__(
        self,
        stages_of: StagesOf,
        model: ModelDef,
        trainable: Collection[str],
        devices: DeviceGroups | MeshWide,
        *,
        sums: str = "gradients",
        prefix: str = "",
    ):
        self.devices, self._stages_of, self._shapes = devices, stages_of, model.shapes
        self._sums, self._prefix = sums, prefix
        self._trainable = trainable
        self._stages: Stages | None = None
        self._programs: dict[int, _Programs] = {}
        add_groups = jax.jit(lambda a, b: jax.tree_util.tree_map_with_path(self._combine, a, b), donate_argnums=0)
        self._add_groups = Program("add turns", add_groups, sums, elementwise=True)
        storage = devices.sharding.storage
        zeros: Callable[[jax.ShapeDtypeStruct], jax.Array] = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        self._zeros = {
            name: Program(
                f"zeros of {name}", jax.jit(partial(zeros, self._shapes[name]), out_shardings=storage[name]), sums
            )
            for name in trainable
        }

    def prepare(self, batch: Batch, plan: MicrobatchPlan) -> None:
        """Compiles for microbatches of `plan` with rows of the same shape as in `batch`, unless this has been done."""
        if plan.rows not in self._programs:
            rows = plan.microbatch_shapes(batch)
            self._programs[plan.rows] = _Programs(self._stages_for(rows), rows)
        self._programs[plan.rows].programs_with_exchanges(self.devices.divide_microbatches(plan))

    def compile(self, batch: Batch, plan: MicrobatchPlan) -> Executable | Executables:
        """Same as `prepare`, but returns the programs of a microbatch."""
        self.prepare(batch, plan)
        stages, by_name = self._programs[plan.rows].stages, self._programs[plan.rows].programs_by_name()
        if len(by_name) == 1:
            return next(iter(by_name.values())).program
        counts = {kind.functions.name: len(kind.functions.layers or (0,)) for kind in stages.kinds}
        times = {name: counts[name.removesuffix(" gradient")] for name in by_name}
        return Executables({name: executable.program for name, executable in by_name.items()}, times)

    def _stages_for(self, rows: Batch) -> Stages:
        if self._stages is None:
            functions, names = self._stages_of(rows), {"sums": self._sums, "prefix": self._prefix}
            self._stages = Stages(functions, self._shapes, self._trainable, self.devices, **names)
        return self._stages

    @cached_property
    def _terms(self) -> str:
        """Name, in plans, of the sums over the microbatches of a device."""
        assert self._stages is not None
        return self._stages.last.labels.gradients

    @cached_property
    def _widen(self) -> Program:
        return Program("widen", jax.jit(self._added), self._terms, elementwise=True)

    @cached_property
    def _add(self) -> Program:
        """Program that adds sums. Donates its first argument, which has the dtypes of the sum."""
        return Program("add", jax.jit(self._added, donate_argnums=0), self._terms, elementwise=True)

    @cached_property
    def _cast(self) -> Program:
        cast = jax.jit(lambda sums: Sums(sums.scalars, self._cast_to_param_dtypes(sums.tree)))
        return Program("cast", cast, self._terms, elementwise=True)

    def prepare_params(self, params: Params) -> PreparedParams:
        """Prepares the parameters for `__call__`. Must be called after compiling."""
        assert self._stages is not None
        return self._stages.prepare_params(params)

    def is_compiled(self, plan: MicrobatchPlan) -> bool:
        """Returns true if microbatches of `plan` need no compilation."""
        return plan.rows in self._programs

    def __call__(self, ready: PreparedParams, batch: PlacedBatch, step: int, tap: Tap | None = None) -> Sums:
        """Computes the sums over the global batch: scalars on every device, and gradients in storage sharding.

        Args:
            ready: all parameters, prepared by `prepare_params`.
            batch: a batch that was placed on the same devices.
            step: number of the step.
            tap: receives the sums of every microbatch.
        """
        programs = self._programs[batch.plan.rows]
        groups = [*microbatch_groups(batch, self.devices, step)]
        total = TreeSum[tuple[dict[str, jax.Array], list[Params]]](
            len(groups), lambda a, b: wait_on_cpu(self._add_groups(a, b))
        )
        for group in groups:
            total.push(self._sum_group(programs, ready, group, tap))
        scalars, grads = total.result()
        return Sums(scalars, self._join_gradients(grads))

    def compute_only(self, ready: PreparedParams, batch: PlacedBatch, step: int, tap: Tap) -> None:
        """Computes the sums of every microbatch like `__call__`, but does not add them over devices."""
        programs = self._programs[batch.plan.rows]
        for group in microbatch_groups(batch, self.devices, step):
            stages, saved = programs.stages, list[Microbatches[SavedForBackward]]()
            queue = LayerQueue(self.devices.layers_at_once)
            saved.append(programs.forward(ready, group, saved).map(lambda stream: SavedForBackward(stream, ())))
            derivatives = group.microbatches.map(lambda _: None)
            for call in reversed(stages.order):
                if programs.gradients[call.kind] is None:
                    continue
                derivatives, _ = self._compute_gradients(
                    programs,
                    group,
                    call,
                    saved.pop(),
                    derivatives,
                    stages.gather(ready, call, gradient=True),
                    None,
                    tap,
                )
                if stages.kinds[call.kind].layered:
                    queue.push(derivatives)

    def _sum_group(
        self, programs: _Programs, ready: PreparedParams, group: MicrobatchGroup, tap: Tap | None
    ) -> tuple[dict[str, jax.Array], list[Params]]:
        """Computes sums over the microbatches of a group: scalars, and the stored gradients of each kind of stage."""
        stages, saved = programs.stages, list[Microbatches[SavedForBackward]]()
        queue = LayerQueue(self.devices.layers_at_once)
        saved.append(programs.forward(ready, group, saved).map(lambda stream: SavedForBackward(stream, ())))
        derivatives = group.microbatches.map(lambda _: None)
        scalars: dict[str, jax.Array] = {}
        grads: list[Params | None] = [None] * len(stages.kinds)
        calls = [*reversed(stages.order)]
        exchanging = programs.programs_with_exchanges(group.shares)
        overlapped = {
            n
            for n, call in enumerate(calls)
            if call.kind in exchanging and len(calls) - 1 - n in stages.below_and_above.positions
        }
        gathered: list[Params] | None = None
        unreduced: list[list[Sums]] = []
        for n, call in enumerate(calls):
            kind = stages.kinds[call.kind]
            if programs.gradients[call.kind] is None:
                continue
            if gathered is None:
                gathered = stages.gather(ready, call, gradient=True)
            exchange = None
            if n in overlapped:
                above, below = calls[n - 1], calls[n + 1]
                exchange = FirstExchange(
                    exchanging[call.kind],
                    (
                        stages.kinds[below.kind].gradient.params.select(ready.params),
                        below.row,
                        self._take_layer_grads(stages, grads, above),
                        stages.kinds[above.kind].stack_sums(unreduced, group.shares),
                        above.row,
                    ),
                )
                unreduced = []
            derivatives, sums = self._compute_gradients(
                programs, group, call, saved.pop(), derivatives, gathered, exchange, tap
            )
            gathered = None
            if exchange is not None:
                gathered_below, grads[calls[n - 1].kind] = exchange.take_results()
                gathered = [gathered_below]
            if kind.layered:
                if n + 1 in overlapped:
                    unreduced = sums
                else:
                    layer_grads = self._take_layer_grads(stages, grads, call)
                    grads[call.kind] = kind.reduce_layer(layer_grads, sums, group.shares, call.row)
                queue.push(derivatives)
            else:
                reported, grads[call.kind] = kind.reduce(sums, group.shares)
                scalars = scalars or reported
        return scalars, [kind_grads or {} for kind_grads in grads]

    def _take_layer_grads(self, stages: Stages, grads: list[Params | None], call: StageCall) -> Params:
        """Takes the gradients of all layers of one kind out of `grads`: zeros before the first layer is reduced."""
        layer_grads, grads[call.kind] = grads[call.kind], None
        return stages.kinds[call.kind].zero_gradients() if layer_grads is None else layer_grads

    def _compute_gradients(  # noqa: PLR0913 - a stage, its inputs, and the exchange that overlaps with it
        self,
        programs: _Programs,
        group: MicrobatchGroup,
        call: StageCall,
        saved: Microbatches[SavedForBackward],
        derivatives: Microbatches[PyTree],
        gathered: list[Params],
        exchange: FirstExchange | None,
        tap: Tap | None,
    ) -> tuple[Microbatches[PyTree], list[list[Sums]]]:
        """Computes the derivatives with respect to the inputs of a stage, and the sums of its gradients, for each
        device group.

        Args:
            programs: programs of a microbatch.
            group: microbatches to compute.
            call: stage to compute.
            saved: values that the forward pass saved.
            derivatives: derivatives of the loss with respect to the output of the stage.
            gathered: gathered parameters of the stage.
            exchange: exchange that overlaps with the first microbatch.
            tap: receives the sums of every microbatch.
        """
        run, shares = programs.gradients[call.kind], group.shares
        assert run is not None
        # Devices with unequal shares add their microbatches in different orders, so each adds its own.
        unequal = self.devices if isinstance(self.devices, MeshWide) and not shares.is_even else None
        groups = self.devices.groups if unequal is None else unequal.devices.groups
        trees: list[TreeSum[Sums]] = [group.make_tree_sum(shares, self._add_to) for group in groups]
        positions = itertools.count()

        def differentiate(microbatch: Microbatch, inputs: SavedForBackward, derivative: PyTree) -> PyTree:
            i, rows, step, index = microbatch
            arguments = (gathered[i], *inputs, rows, call.numbers[i], derivative, step, index)
            derivative, sums = run(i, *arguments) if exchange is None else exchange.run_first(run, i, arguments)
            if tap is not None:
                tap(i, microbatch, sums)
            if unequal is None:
                trees[i].push(sums)
            else:
                # The first devices have the most microbatches.
                for tree, own_sums in zip(trees, unequal.split_results(sums, next(positions), shares), strict=False):
                    tree.push(own_sums)
            return derivative

        derivatives = group.microbatches.map(differentiate, saved, derivatives)
        parts = [[part for _, part in tree.partial_sums()] for tree in trees]
        # Devices exchange arrays of one dtype: if some devices have added microbatches, all cast to the dtype of sums.
        if shares.max_terms > 1 and not shares.is_even:
            parts = [[self._widen_sums(part) for part in of_group] for of_group in parts]
        return derivatives, parts

    def _add_to(self, total: Sums, item: Sums) -> Sums:
        return (self._add if self._is_wide(total) else self._widen)(total, item)

    def _is_wide(self, sums: Sums) -> bool:
        return all(x.dtype == self._shapes[name].dtype for name, x in sums.tree.items())

    def _widen_sums(self, sums: Sums) -> Sums:
        return sums if self._is_wide(sums) else self._cast(sums)

    def _added(self, total: Sums, item: Sums) -> Sums:
        left, right = self._cast_to_param_dtypes(total.tree), self._cast_to_param_dtypes(item.tree)
        return Sums(
            {name: x + item.scalars[name] for name, x in total.scalars.items()},
            {name: self._operation(name)(x, right[name]) for name, x in left.items()},
        )

    def _operation(self, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns the operation that combines the gradients of a parameter."""
        return jnp.maximum if self.devices.sharding.params[name].combine == "maximum" else jnp.add

    def _combine(self, path: jax.tree_util.KeyPath, a: jax.Array, b: jax.Array) -> jax.Array:
        """Combines scalars, or gradients by the name of their parameter, which is the last key."""
        key = path[-1]
        is_gradient = isinstance(key, jax.tree_util.DictKey) and key.key in self._shapes
        return self._operation(key.key)(a, b) if is_gradient else a + b

    def _cast_to_param_dtypes(self, tree: Params) -> Params:
        return {name: x.astype(self._shapes[name].dtype) for name, x in tree.items()}

    def _join_gradients(self, grads: Sequence[Params]) -> Params:
        """Joins the gradients of all stages. If two stages read a parameter, the later stage is the first term."""
        first, *layers, last = grads if len(grads) > 1 else ({}, *grads)
        joined = dict(last)
        for stage_grads in (*layers, first):
            twice = {name: x for name, x in stage_grads.items() if name in joined}
            if twice:
                sums = wait_on_cpu(self._add_groups({name: joined[name] for name in twice}, twice))
                joined |= {**stage_grads, **sums}
            else:
                joined |= stage_grads
        # A parameter that no stage reads does not affect the loss.
        return {name: joined[name] if name in joined else self._zeros[name]() for name in self._zeros}
