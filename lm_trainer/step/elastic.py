"""One optimizer step, bit for bit the same on every mesh.

The global batch is cut into a fixed number of microbatches of fixed size. Each is computed by an
executable of its own; their gradients are added by one fixed binary tree, first inside a device, then across devices;
then the state is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.piecewise import Piecewise
from lm_trainer.optim import OptimizerConfig
from lm_trainer.optim.averaging import AveragingConfig
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.no_fma import without_fma
from lm_trainer.parallel.ordered_sum import sum_of_squares
from lm_trainer.step.executable import Executable
from lm_trainer.step.microbatch import DeviceGroups, MicrobatchFn, MicrobatchPlan, MicrobatchSum, PlacedBatch, Sums
from lm_trainer.step.phases import Phase, StepProgram
from lm_trainer.step.state import ModelDef, Params, StateSharding, TrainState, abstract_state
from lm_trainer.step.update import Metrics, compile_update

LossFn = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
"""`loss(model, batch, key) -> (sum of the weighted losses, sum of the weights, metrics)`, all float32 scalars; metrics
are sums as well, and reported divided by the sum of the weights. The key is for dropout; None switches it off."""

CurvatureFn = Callable[[Any, Batch, jax.Array], Any]
"""`curvature(model, batch, key) -> nested dict like the parameters`, sums over the microbatch."""

_GATHERED = "gathered parameters"


class Observer(Protocol):
    """Something that looks at the inside of a step."""

    def before(self, state: TrainState) -> Any:
        """What it needs of the state before the step, which the step consumes."""
        ...

    def after(self, before: Any, grads: Params, weight: jax.Array, state: TrainState) -> None:
        """`grads` are sums over the batch, and `weight` what to divide them by; the state is that after the step."""
        ...


@dataclass(frozen=True)
class UpdateRule:
    """How a gradient becomes new weights."""

    optimizer: OptimizerConfig
    tx: optax.GradientTransformationExtraArgs
    """Built from `optimizer` for the parameters that are trained."""
    averaging: AveragingConfig | None = None
    curvature: CurvatureFn | None = None
    """The estimate that the optimizer takes."""


class Step(Protocol):
    """One optimizer step after another; what `determinism: elastic` and `fast` have in common.

    Calling it with a batch placed by `put` returns the next state and float32 scalars on the device (`loss`,
    `grad_norm`, `tokens` and others): reading them waits for the step. The state that it is given is consumed. A step
    whose loss or gradient is not finite leaves parameters and optimizer as they were.
    """

    plans: Piecewise[MicrobatchPlan]
    devices: DeviceGroups

    def compile(self, batch: Batch, step: int = 0) -> Executable:
        """Compiles for rows like those of `batch` (any number of rows) and the batch size of `step`.

        Returns the program that computes the gradient: of a microbatch, or where that is one program, of the step.
        """
        ...

    def compiled(self, step: int) -> bool:
        """Whether this step needs no compilation."""
        ...

    def local_rows(self, step: int = 0) -> range:
        """The rows of the global batch of `step` that this process needs."""
        ...

    def put(self, batch: Batch, step: int = 0) -> Any:
        """This process's rows of the global batch of `step` on their devices."""
        ...

    def phases(self, batch: Batch, plan: MicrobatchPlan, platform: str) -> Iterator[Phase]:
        """The phases of a step that computes everything that any step does; nothing is compiled.

        Args:
            batch: rows like those of the step, any number of them.
            plan: of the batch.
            platform: on which the step is to run; how many programs a device runs at once depends on it.
        """
        ...

    def gradient(self, state: TrainState, batch: Any) -> Sums:
        """The sums of the loss (and what it reports), the weights and the gradients over the global batch."""
        ...

    def __call__(
        self, state: TrainState, batch: Any, learning_rate: float, observer: Observer | None = None
    ) -> tuple[TrainState, Metrics]: ...


class ElasticStep:
    """The `Step` whose bits are the same on every mesh."""

    def __init__(
        self,
        model: ModelDef,
        loss: LossFn,
        rule: UpdateRule,
        *,
        sharding: StateSharding,
        plans: Piecewise[MicrobatchPlan],
        key: jax.Array,
    ):
        mesh, shardings = sharding.mesh, sharding.trained
        self.plans, self.devices, self._shapes = plans, DeviceGroups(sharding), model.shapes
        for plan in plans.values:
            plan.per_shard(mesh)
        trainable = shardings.params
        self._gradient = MicrobatchSum(loss_and_gradient(model, loss, trainable), self.devices, key, trainable)
        self._curvature = None
        if rule.curvature is not None:
            estimate = curvature_sums(model, rule.curvature, trainable)
            self._curvature = MicrobatchSum(estimate, self.devices, jax.random.fold_in(key, 1), trainable)
        self._rule = rule
        param_shardings = {name: sharding.params[name] for name in trainable}
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._norm = jax.jit(lambda grads: sum_of_squares(grads, param_shardings, mesh), out_shardings=everywhere)
        self._update = compile_update(rule.optimizer, rule.tx, shardings, mesh)
        self._average = jax.jit(without_fma(move), out_shardings=shardings.params, donate_argnums=1)

    def compile(self, batch: Batch, step: int = 0) -> Executable:
        """Compiles for rows like those of `batch` (any number of rows) and the batch size of `step`."""
        if self._curvature is not None:
            self._curvature.compile(self._shapes, batch, self.plans.at(step))
        return self._gradient.compile(self._shapes, batch, self.plans.at(step)).program

    def compiled(self, step: int) -> bool:
        """Whether this step needs no compilation."""
        return self._gradient.compiled(self.plans.at(step))

    def local_rows(self, step: int = 0) -> range:
        """The rows of the global batch of `step` that this process needs."""
        return self.devices.local_rows(self.plans.at(step))

    def put(self, batch: Batch, step: int = 0) -> PlacedBatch:
        """This process's rows of the global batch of `step` on their devices."""
        return self.devices.put(batch, self.plans.at(step))

    def gradient(self, state: TrainState, batch: PlacedBatch) -> Sums:
        """The sums of the loss (and what it reports), the weights and the gradients over the global batch."""
        return self._gradient(self._on_groups(state), batch, state.step)

    def _on_groups(self, state: TrainState) -> list[Params]:
        return self.devices.params_on_groups({**state.frozen, **state.params})

    def __call__(
        self, state: TrainState, batch: PlacedBatch, learning_rate: float, observer: Observer | None = None
    ) -> tuple[TrainState, Metrics]:
        """One step on a batch placed by `put`."""
        (scalars, grads), curvature = self._gradient_and_curvature(state, batch)
        before = None if observer is None else observer.before(state)
        scalars = {**scalars, "squares": wait_on_cpu(self._norm(grads)), "learning_rate": np.float32(learning_rate)}
        params, opt_state, metrics = self._update(state.params, state.opt_state, grads, curvature, scalars)
        done = TrainState(state.step + 1, params, opt_state, self._averaged(state, params), state.frozen)
        if observer is not None:
            observer.after(before, grads, scalars["weight"], done)
        return done, metrics

    def phases(self, batch: Batch, plan: MicrobatchPlan, platform: str) -> Iterator[Phase]:
        """Describes `__call__`, program by program; a change of one needs a change of the other."""
        sharding, averaged = self.devices.sharding, self._rule.averaging is not None
        state = abstract_state(self._shapes, self._rule.tx, sharding, averaged=averaged)
        if (gather := self.devices.gathering(self._shapes)) is not None:
            yield Phase("gather", gather, adds={_GATHERED: gather.outputs}, leaves={_GATHERED: gather.outputs})
        sums = [*self._gradient.phases("microbatch", "gradients", self._shapes, batch, plan, platform)]
        if self._curvature is not None:
            sums += self._curvature.phases("curvature", "estimates", self._shapes, batch, plan, platform)
        yield from sums[:-1]
        # Gathered parameters live until all sums are there: see `_gradient_and_curvature`.
        yield replace(sums[-1], frees=(*sums[-1].frees, _GATHERED))
        # Gradients and estimates have the shapes of the parameters, and lie as they do.
        grads, curvature = state.params, None if self._curvature is None else state.params
        yield Phase("norm", StepProgram("norm", partial(Executable.make, self._norm, grads)))
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(sharding.mesh, PartitionSpec()))
        scalars = {**dict.fromkeys(("loss", "weight", "squares"), scalar), "learning_rate": np.float32(0)}
        yield from self._update.phases(state.params, state.opt_state, grads, curvature, scalars)
        if averaged:
            moved = (np.uint32(0), state.averaged, state.params, np.float32(0))
            average = StepProgram("average", partial(Executable.make, self._average, *moved))
            yield Phase("average", average, adds={"new state": average.new})

    def _gradient_and_curvature(self, state: TrainState, batch: PlacedBatch) -> tuple[Sums, Params | None]:
        # Whole parameters live as long as this function: the update finds their memory free.
        on_groups = self._on_groups(state)
        sums = self._gradient(on_groups, batch, state.step)
        if self._curvature is None or state.step % self._rule.optimizer.curvature_interval:
            return sums, None
        return sums, self._curvature(on_groups, batch, state.step).tree

    def _averaged(self, state: TrainState, params: Params) -> Params | None:
        if state.averaged is None or self._rule.averaging is None:
            return None
        share = np.float32(self._rule.averaging.share(state.step + 1))
        return self._average(np.uint32(0), state.averaged, params, share)


def loss_and_gradient(model: ModelDef, loss: LossFn, trainable: Collection[str]) -> MicrobatchFn:
    """The sums that the loss reports, and the gradient of its first for the parameters `trainable`."""

    def function(params: Params, batch: Batch, key: jax.Array) -> Sums:
        def objective(chosen: Params) -> tuple[jax.Array, Any]:
            total, weight, metrics = loss(model.merge({**params, **chosen}), batch, key)
            return total, {"loss": total, "weight": weight, **metrics}

        (_, scalars), grads = jax.value_and_grad(objective, has_aux=True)({name: params[name] for name in trainable})
        return Sums(scalars, grads)

    return function


def curvature_sums(model: ModelDef, curvature: CurvatureFn, trainable: Collection[str]) -> MicrobatchFn:
    """The optimizer's estimate for the parameters `trainable`, as sums."""

    def function(params: Params, batch: Batch, key: jax.Array) -> Sums:
        sums = curvature(model.merge(params), batch, key)
        named = model.named(sums)
        return Sums({}, {name: named[name] for name in trainable})

    return function


def move(averaged: Params, params: Params, share: jax.Array) -> Params:
    """The average after one more step, of which `share` is that of the new parameters."""
    return jax.tree.map(lambda a, p: a + share.astype(a.dtype) * (p.astype(a.dtype) - a), averaged, params)
