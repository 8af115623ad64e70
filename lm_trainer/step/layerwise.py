"""The gradient of a batch computed layer by layer, in an order that no mesh changes, with the memory of FSDP.

A device holds the parameters of one layer at a time, gathered over the batch axes by a program of their own. Each part
of each microbatch is an executable of its own (`PerGroupExecutable`), the same one for every layer, microbatch and
mesh. The gradients of a layer are added over the microbatches of a device by the fixed tree, then over devices, and
are stored cut before the next layer is computed:

    forward     for each layer:            gather; each microbatch: stream = layer(stream)     kept: what enters it
    backward    for each layer, reversed:  gather; each microbatch: compute again, gradients; add; reduce over devices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.tree_sum import TreeSum
from lm_trainer.step.executable import Executable, Executables
from lm_trainer.step.gradient import Sums
from lm_trainer.step.groups import DeviceGroups, PlacedBatch
from lm_trainer.step.layerwise_model import Functions, LayerwiseForward, Parts, PerMicrobatch, Queue, Turn, turns
from lm_trainer.step.layerwise_phases import layerwise_phases
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.model_def import Params
from lm_trainer.step.part_functions import SCALAR
from lm_trainer.step.per_group import PerGroupExecutable
from lm_trainer.step.phases import Phase
from lm_trainer.step.saving_layer import SavingLayer


class _Gradients(NamedTuple):
    """Gradients of a turn by the part that made them, in storage."""

    enter: Params
    layers: list[Params]
    leave: Params


class _Programs:
    """The executables of a microbatch.

    Args:
        parts: of the loss.
        batch: the shapes of a microbatch.
    """

    def __init__(self, parts: Parts, batch: Batch):
        functions, stream, saving = parts.functions, parts.stream(batch), parts.saving_layers()
        self.forward = LayerwiseForward(parts, batch, saving)

        self.leave = parts.compile(
            functions.leave_gradient,
            parts.leave,
            (stream, batch, SCALAR, SCALAR),
            ("stream", "sums"),
            donated=(1,),
        )
        # What entered the layer is not needed again: its derivative takes its memory.
        self.layers = [
            parts.compile(function, part, arguments, ("stream", "sums"), donated=(1,))
            for part, (function, arguments) in zip(parts.places, _layer_gradients(parts, saving, batch), strict=True)
        ]
        self.enter = None
        if parts.enter.trained:
            self.enter = parts.compile(functions.enter_gradient, parts.enter, (batch, stream, SCALAR, SCALAR), "sums")

    def named(self) -> dict[str, PerGroupExecutable]:
        """All of them."""
        layers = {f"layer {place}": program for place, program in enumerate(self.forward.layers)}
        layers |= {f"layer {place} gradient": program for place, program in enumerate(self.layers)}
        others = {"enter": self.forward.enter, **layers, "leave gradient": self.leave}
        return others if self.enter is None else {**others, "enter gradient": self.enter}


def _layer_gradients(
    parts: Parts, saving: Sequence[SavingLayer] | None, batch: Batch
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The derivative of the layer at each place of the period, with the shapes of its arguments beside parameters."""
    stream = parts.stream(batch)
    for place, part in enumerate(parts.places):
        if saving is None:
            function, kept = parts.functions.layer_gradient(place), ()
        else:
            function, forward = saving[place].gradient, saving[place].forward
            _, handed_on = jax.eval_shape(forward, part.shapes(), stream, batch, SCALAR, SCALAR, SCALAR)
            kept = (handed_on,)
        yield function, (stream, *kept, batch, SCALAR, stream, SCALAR, SCALAR)


class LayerwiseSum:
    """Computes the gradient of every microbatch layer by layer and adds the results by one fixed tree.

    Args:
        functions: of the parts.
        devices: where.
    """

    def __init__(self, functions: Functions, devices: DeviceGroups):
        self.devices, self._functions, self._shapes = devices, functions, functions.model.shapes
        self._parts: Parts | None = None
        self._programs: dict[int, _Programs] = {}
        # The sum takes the memory of its first term, unless that has narrower values than the sum.
        self._widen = jax.jit(self._added)
        self._add = jax.jit(self._added, donate_argnums=0)
        self._cast = jax.jit(lambda sums: Sums(sums.scalars, self._as_parameters(sums.tree)))
        self._add_turns = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        storage = devices.sharding.storage
        zeros: Any = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        self._zeros = {
            name: jax.jit(partial(zeros, self._shapes[name]), out_shardings=storage[name])
            for name in functions.trainable
        }

    def compile(self, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch, plan: MicrobatchPlan) -> Executables:
        """Compiles for microbatches of `plan` with rows like those of `batch`, unless that was done before."""
        if plan.rows not in self._programs:
            self._programs[plan.rows] = _Programs(self._found(shapes, batch, plan), plan.rows_like(batch))
        by_name = {name: each.program for name, each in self._programs[plan.rows].named().items()}
        counts = self._found(shapes, batch, plan).counts
        return Executables(by_name, {name: counts.get(name.removesuffix(" gradient"), 1) for name in by_name})

    def phases(
        self,
        sums: str,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        batch: Batch,
        plan: MicrobatchPlan,
        platform: str,
        prefix: str = "",
    ) -> Iterator[Phase]:
        """The phases of `__call__`; arguments as for `MicrobatchSum.phases`, and `prefix` of the names of programs."""

        def compiled(name: str) -> Executable:
            return self.compile(shapes, batch, plan).by_name[name]

        return layerwise_phases(self._found(shapes, batch, plan), compiled, plan, platform, sums, prefix)

    def _found(self, shapes: Mapping[str, jax.ShapeDtypeStruct], batch: Batch, plan: MicrobatchPlan) -> Parts:
        if self._parts is None:
            self._parts = Parts(self._functions, shapes, self.devices, plan.rows_like(batch))
        return self._parts

    def ready(self, params: Params) -> Params:
        """All parameters as `__call__` takes them: those of the state."""
        return params

    def compiled(self, plan: MicrobatchPlan) -> bool:
        """Returns true if microbatches of `plan` need no compilation."""
        return plan.rows in self._programs

    def __call__(self, params: Params, batch: PlacedBatch, step: int) -> Sums:
        """The sums over the global batch: scalars on every device, the gradients as the state in storage.

        Args:
            params: all parameters, as the state has them.
            batch: placed by the same devices.
            step: its number.
        """
        programs = self._programs[batch.plan.rows]
        each = [*turns(batch, self.devices, step)]
        total = TreeSum[Any](len(each), lambda a, b: wait_on_cpu(self._add_turns(a, b)))
        for turn in each:
            total.push(self._turn(programs, params, turn))
        scalars, grads = total.result()
        return Sums(scalars, self._joined(grads))

    def _turn(self, programs: _Programs, params: Params, turn: Turn) -> tuple[dict[str, jax.Array], _Gradients]:
        parts, kept = programs.forward.parts, []
        streams = programs.forward(params, turn, kept)
        derivatives, sums = self._leave(programs, params, turn, streams)
        scalars, leave = parts.leave.reduce(sums, turn.shares)
        layers, queue = [part.no_gradients() for part in parts.places], Queue()
        for layer in reversed(range(parts.num_layers)):
            place = layer % parts.period
            derivatives, sums = self._layer(programs, params, turn, layer, kept.pop(), derivatives)
            layers[place] = parts.places[place].reduce_layer(layers[place], sums, turn.shares, parts.row(layer))
            queue.push(derivatives)
        return scalars, _Gradients(self._enter(programs, params, turn, derivatives), layers, leave)

    # Each part has a function of its own, with which what it gathered goes.

    def _leave(
        self, programs: _Programs, params: Params, turn: Turn, streams: PerMicrobatch
    ) -> tuple[PerMicrobatch, list[list[Sums]]]:
        parts = programs.forward.parts
        gathered = parts.leave.gather(params, parts.row(0))
        return self._sum(
            turn, lambda i, j, rows, step, index: programs.leave(i, gathered[i], streams[i][j], rows, step, index)
        )

    def _layer(
        self,
        programs: _Programs,
        params: Params,
        turn: Turn,
        layer: int,
        kept: PerMicrobatch,
        derivatives: PerMicrobatch,
    ) -> tuple[PerMicrobatch, list[list[Sums]]]:
        parts = programs.forward.parts
        run, number = programs.layers[layer % parts.period], parts.number(layer)
        gathered = parts.of_layer(layer).gather(params, parts.row(layer))
        return self._sum(
            turn,
            lambda i, j, rows, step, index: run(
                i, gathered[i], *kept[i][j], rows, number[i], derivatives[i][j], step, index
            ),
        )

    def _enter(self, programs: _Programs, params: Params, turn: Turn, derivatives: PerMicrobatch) -> Params:
        part, run = programs.forward.parts.enter, programs.enter
        if run is None:
            return {}
        gathered = part.gather(params, programs.forward.parts.row(0))
        _, sums = self._sum(
            turn, lambda i, j, rows, step, index: (None, run(i, gathered[i], rows, derivatives[i][j], step, index))
        )
        return part.reduce(sums, turn.shares).tree

    def _sum(self, turn: Turn, function: Callable[..., tuple[Any, Sums]]) -> tuple[PerMicrobatch, list[list[Sums]]]:
        """The values that `function` returns of each microbatch, and for each group the sums of the rest."""
        shares, groups = turn.shares, self.devices.groups
        trees = [TreeSum[Sums](shares.count, self._add_to, shares.terms(group.index).start) for group in groups]

        def one(i: int, *others: Any) -> Any:
            value, sums = function(i, *others)
            trees[i].push(sums)
            return value

        values, parts = turn.each(one), [[part for _, part in tree.parts()] for tree in trees]
        # Devices exchange arrays of one dtype: where some have added microbatches up, all give such sums.
        if shares.most > 1 and not shares.even:
            parts = [[self._wide(part) for part in of_group] for of_group in parts]
        return values, parts

    def _add_to(self, total: Sums, item: Sums) -> Sums:
        return (self._add if self._is_wide(total) else self._widen)(total, item)

    def _is_wide(self, sums: Sums) -> bool:
        return all(x.dtype == self._shapes[name].dtype for name, x in sums.tree.items())

    def _wide(self, sums: Sums) -> Sums:
        return sums if self._is_wide(sums) else self._cast(sums)

    def _added(self, total: Sums, item: Sums) -> Sums:
        left, right = self._as_parameters(total.tree), self._as_parameters(item.tree)
        return Sums(
            {name: x + item.scalars[name] for name, x in total.scalars.items()},
            {name: x + right[name] for name, x in left.items()},
        )

    def _as_parameters(self, tree: Params) -> Params:
        return {name: x.astype(self._shapes[name].dtype) for name, x in tree.items()}

    def _joined(self, grads: _Gradients) -> Params:
        """The gradients of all parameters; of one that two parts read, the later part's and then the earlier one's."""
        joined = dict(grads.leave)
        for found in (*grads.layers, grads.enter):
            twice = {name: x for name, x in found.items() if name in joined}
            both = self._add_turns({name: joined[name] for name in twice}, twice)
            joined |= {**found, **wait_on_cpu(both)}
        # A parameter that no part reads has no part in the loss.
        return {name: joined[name] if name in joined else self._zeros[name]() for name in self._zeros}
