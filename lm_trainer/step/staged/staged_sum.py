"""A function of every microbatch computed stage by stage, and added up in an order that no mesh changes.

A device holds the parameters of one stage at a time, gathered over the batch axes by a program of their own. Each stage
of each microbatch is an executable of its own (`PerGroupExecutable`), the same one for every microbatch and mesh, and
for every layer. The gradients of a stage are added over the microbatches of a device by the fixed tree, then over
devices, and are stored cut before the next stage is computed:

    forward     for each stage but the last:  gather; each microbatch: stream = stage(stream)     kept: what enters it
    backward    for each stage, reversed:     gather; each microbatch: gradients; add; reduce over devices

With one stage, the whole model, that is the gradient of each microbatch by one program. With an embedding, layers and a
head it takes the memory of FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.tree_sum import TreeSum
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.microbatches import Microbatch, Microbatches, MicrobatchGroup, microbatch_groups
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.loss.gradient import Sums
from lm_trainer.step.staged.stage_functions import StageFunctions
from lm_trainer.step.staged.stages import Passed, Queue, Ready, StageAt, StagedForward, Stages
from lm_trainer.step.state.model_def import ModelDef, Params

StagesOf = Callable[[Batch], Sequence[StageFunctions]]
"""From the shapes of a microbatch to the stages of a loss, in their order."""


class _Programs:
    """The executables of a microbatch.

    Args:
        stages: of the loss.
        batch: the shapes of the microbatch.
    """

    def __init__(self, stages: Stages, batch: Batch):
        self.stages, self.forward = stages, StagedForward.compile(stages, batch)
        # The derivative for what enters the first stage is nobody's: it is for the parameters alone.
        needed = [kind.trained or place > 0 for place, kind in enumerate(stages.kinds)]
        self.gradients = [stages.compile_gradient(place, batch) if need else None for place, need in enumerate(needed)]

    def named(self) -> dict[str, PerGroupExecutable]:
        """All of them."""
        names, kinds = [kind.functions.name for kind in self.stages.kinds], range(len(self.stages.kinds))
        if len(kinds) == 1:
            return {names[0]: self.gradients[0]}  # pyright: ignore[reportReturnType] - something is trained
        # The order is that in which runs have recorded them.
        first, *layers, last = kinds
        forward = {names[place]: self.forward.programs[place] for place in (first, *layers)}
        return forward | {
            f"{names[place]} gradient": program
            for place in (*layers, last, first)
            if (program := self.gradients[place]) is not None
        }


class StagedSum:
    """Computes the gradient of every microbatch stage by stage and adds the results by one fixed tree.

    Args:
        stages_of: the loss.
        model: whose parameters they read.
        trainable: the parameters that have a gradient.
        devices: where.
        sums: what a plan calls the sums.
        prefix: of the programs of several stages in a plan.
    """

    def __init__(
        self,
        stages_of: StagesOf,
        model: ModelDef,
        trainable: Collection[str],
        devices: DeviceGroups,
        *,
        sums: str = "gradients",
        prefix: str = "",
    ):
        self.devices, self._stages_of, self._shapes = devices, stages_of, model.shapes
        self._sums, self._prefix = sums, prefix
        self._trainable = trainable
        self._stages: Stages | None = None
        self._programs: dict[int, _Programs] = {}
        add_groups = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._add_groups = Program("add turns", add_groups, sums, elementwise=True)
        storage = devices.sharding.storage
        zeros: Any = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
        self._zeros = {
            name: Program(
                f"zeros of {name}", jax.jit(partial(zeros, self._shapes[name]), out_shardings=storage[name]), sums
            )
            for name in trainable
        }

    def prepare(self, batch: Batch, plan: MicrobatchPlan) -> None:
        """Compiles for microbatches of `plan` with rows like those of `batch`, unless that was done before."""
        if plan.rows not in self._programs:
            rows = plan.rows_like(batch)
            self._programs[plan.rows] = _Programs(self._stages_for(rows), rows)

    def compile(self, batch: Batch, plan: MicrobatchPlan) -> Executable | Executables:
        """As `prepare`; returns the programs of a microbatch."""
        self.prepare(batch, plan)
        stages, by_name = self._programs[plan.rows].stages, self._programs[plan.rows].named()
        if len(by_name) == 1:
            return next(iter(by_name.values())).program
        counts = {kind.functions.name: len(kind.functions.layers or (0,)) for kind in stages.kinds}
        times = {name: counts[name.removesuffix(" gradient")] for name in by_name}
        return Executables({name: each.program for name, each in by_name.items()}, times)

    def _stages_for(self, rows: Batch) -> Stages:
        if self._stages is None:
            functions, names = self._stages_of(rows), {"sums": self._sums, "prefix": self._prefix}
            self._stages = Stages(functions, self._shapes, self._trainable, self.devices, **names)
        return self._stages

    @cached_property
    def _terms(self) -> str:
        """The name that a plan has for the sums of the microbatches of a device."""
        assert self._stages is not None
        return self._stages.last.labels.gradients

    @cached_property
    def _widen(self) -> Program:
        return Program("widen", jax.jit(self._added), self._terms, elementwise=True)

    @cached_property
    def _add(self) -> Program:
        """The sum takes the memory of its first term, which has values as wide as the sum."""
        return Program("add", jax.jit(self._added, donate_argnums=0), self._terms, elementwise=True)

    @cached_property
    def _cast(self) -> Program:
        cast = jax.jit(lambda sums: Sums(sums.scalars, self._as_parameters(sums.tree)))
        return Program("cast", cast, self._terms, elementwise=True)

    def ready(self, params: Params) -> Ready:
        """All parameters as `__call__` takes them, once it is compiled."""
        assert self._stages is not None
        return self._stages.ready(params)

    def compiled(self, plan: MicrobatchPlan) -> bool:
        """Returns true if microbatches of `plan` need no compilation."""
        return plan.rows in self._programs

    def __call__(self, ready: Ready, batch: PlacedBatch, step: int) -> Sums:
        """The sums over the global batch: scalars on every device, the gradients as the state in storage.

        Args:
            ready: all parameters.
            batch: placed by the same devices.
            step: its number.
        """
        programs = self._programs[batch.plan.rows]
        groups = [*microbatch_groups(batch, self.devices, step)]
        total = TreeSum[Any](len(groups), lambda a, b: wait_on_cpu(self._add_groups(a, b)))
        for group in groups:
            total.push(self._of_group(programs, ready, group))
        scalars, grads = total.result()
        return Sums(scalars, self._joined(grads))

    def _of_group(
        self, programs: _Programs, ready: Ready, group: MicrobatchGroup
    ) -> tuple[dict[str, jax.Array], list[Params]]:
        """The sums over the microbatches of a group: scalars, and the gradients of each kind of stage in storage."""
        stages, kept, queue = programs.stages, list[Microbatches[Passed]](), Queue()
        kept.append(programs.forward(ready, group, kept).map(lambda stream: Passed(stream, ())))
        derivatives = group.microbatches.map(lambda _: None)
        scalars: dict[str, jax.Array] = {}
        grads: list[Params | None] = [None] * len(stages.kinds)
        for at in reversed(stages.order):
            kind = stages.kinds[at.place]
            derivatives, sums = self._backward(programs, ready, group, at, kept.pop(), derivatives)
            if kind.layered:
                before = grads[at.place]
                before = kind.no_gradients() if before is None else before
                grads[at.place] = kind.reduce_layer(before, sums, group.shares, at.row)
                queue.push(derivatives)
            elif sums:
                reported, grads[at.place] = kind.reduce(sums, group.shares)
                scalars = scalars or reported
        return scalars, [found or {} for found in grads]

    # A function of its own, with which what it gathered goes.
    def _backward(
        self,
        programs: _Programs,
        ready: Ready,
        group: MicrobatchGroup,
        at: StageAt,
        passed: Microbatches[Passed],
        derivatives: Microbatches[Any],
    ) -> tuple[Microbatches[Any], list[list[Sums]]]:
        """The derivatives for what enters a stage, and for each device group the sums of its gradients."""
        run, shares = programs.gradients[at.place], group.shares
        if run is None:
            return derivatives, []
        gathered = programs.stages.gather(ready, at)
        trees = [TreeSum[Sums](shares.count, self._add_to, shares.terms(g.index).start) for g in self.devices.groups]

        def one(microbatch: Microbatch, before: Passed, derivative: Any) -> Any:
            i, rows, step, index = microbatch
            derivative, sums = run(i, gathered[i], *before, rows, at.numbers[i], derivative, step, index)
            trees[i].push(sums)
            return derivative

        derivatives = group.microbatches.map(one, passed, derivatives)
        parts = [[part for _, part in tree.parts()] for tree in trees]
        # Devices exchange arrays of one dtype: where some have added microbatches up, all give such sums.
        if shares.most > 1 and not shares.even:
            parts = [[self._wide(part) for part in of_group] for of_group in parts]
        return derivatives, parts

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

    def _joined(self, grads: Sequence[Params]) -> Params:
        """The gradients of all parameters; of one that two stages read, that of the later stage comes first."""
        first, *layers, last = grads if len(grads) > 1 else ({}, *grads)
        joined = dict(last)
        for found in (*layers, first):
            twice = {name: x for name, x in found.items() if name in joined}
            if twice:
                both = wait_on_cpu(self._add_groups({name: joined[name] for name in twice}, twice))
                joined |= {**found, **both}
            else:
                joined |= found
        # A parameter that no stage reads has no part in the loss.
        return {name: joined[name] if name in joined else self._zeros[name]() for name in self._zeros}
