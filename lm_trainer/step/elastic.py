"""An optimizer step that is bit-identical on every mesh.

The global batch is split into a fixed number of microbatches of fixed size. A separate executable computes each
microbatch. The gradients are added by one fixed binary tree, first within a device, then across devices. Then the state
is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.piecewise import Piecewise
from lm_trainer.nn.stages import StagedLoss
from lm_trainer.optim.averaging import ema_update
from lm_trainer.parallel.compile_per_device import disable_cache_for
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.no_fma import without_fma
from lm_trainer.parallel.ordered_sum import sum_of_squares
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.step.base import Marker, Observer, UpdateRule
from lm_trainer.step.check.cross_check import CrossCheck
from lm_trainer.step.check.part_gradients import PartGradients
from lm_trainer.step.check.recompute import Recomputation, positions_of_groups
from lm_trainer.step.choose_update import choose_update
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.dispatch.mesh_executable import ProgramsDiffer
from lm_trainer.step.dispatch.mesh_group import MeshWide, can_be_mesh_wide
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.microbatches import Microbatch
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.loss.gradient import LossFn, Sums, curvature_sums, loss_and_gradient
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.staged.staged_sum import StagedSum, StagesOf, Tap
from lm_trainer.step.staged.stages import PreparedParams
from lm_trainer.step.staged.whole_model import whole_model_stages
from lm_trainer.step.state.model_def import ModelDef, Params
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.split import split_params
from lm_trainer.step.updates.update import Metrics

CurvatureStages = Callable[[ModelDef, jax.Array, Collection[str]], StagesOf]
"""`(model, key data, trained parameters)` -> stages of a curvature estimate."""


class ElasticStep:
    """The `Step` whose results are bit-identical on every mesh.

    Args:
        model: model to train.
        loss: loss of a microbatch.
        rule: update rule.
        plans: divisions of the batches into microbatches.
        plans: how batches are divided into microbatches.
        key: random key for dropout.
        staged: the loss in stages, if a microbatch is to be computed stage by stage; None: in one program.
        curvature_stages: curvature estimate of the optimizer in stages, which replaces the estimate in `rule` if
            `staged` is given.
        microbatches_per_gather: as for `DeviceGroups`.
    """

    loops = True
    marker: Marker | None = None

    def __init__(  # noqa: PLR0913 - the parts of a step
        self,
        model: ModelDef,
        loss: LossFn,
        rule: UpdateRule,
        *,
        sharding: StateSharding,
        plans: Piecewise[MicrobatchPlan],
        key: jax.Array,
        staged: StagedLoss | None = None,
        curvature_stages: CurvatureStages | None = None,
        microbatches_per_gather: int | None = None,
    ):
        mesh, shardings = sharding.mesh, sharding.trained
        self.plans, self.devices = plans, DeviceGroups(sharding, microbatches_per_gather)
        # Called for its errors: a mesh that cannot share a batch is rejected before anything is compiled.
        for plan in plans.values:
            plan.divide_microbatches(mesh)
        trainable = shardings.params
        # A key is folded in, so that the estimate does not reuse the random numbers of dropout in the same microbatch.
        curvature_key = jax.random.fold_in(key, 1)
        estimate = None
        if staged is not None:
            stages: StagesOf = partial(
                SplitLoss(model, staged, jax.random.key_data(key), trainable).stages,
                # Where devices share a microbatch, each of them would have different residuals.
                saves=self.devices.groups[0].mesh.size == 1,
            )
            if curvature_stages is not None:
                estimate = curvature_stages(model, jax.random.key_data(curvature_key), trainable)
        else:
            gradient = loss_and_gradient(model, loss, trainable)
            stages = whole_model_stages("microbatch", gradient, model, trainable, self.devices, key)
            if rule.curvature is not None:
                function = curvature_sums(model, rule.curvature, trainable)
                estimate = whole_model_stages("curvature", function, model, trainable, self.devices, curvature_key)
        self._rule, self._sums = rule, partial(_make_staged_sums, stages, estimate, model, trainable)
        self._dispatch_to(MeshWide(self.devices) if can_be_mesh_wide(self.devices) else self.devices)
        param_shardings = {name: sharding.params[name] for name in trainable}
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._measured = sharding.measured

        def squares(grads: Params) -> jax.Array:
            return sum_of_squares(split_params(grads, self._measured)[0], param_shardings, mesh)

        norm = jax.jit(squares, out_shardings=everywhere)
        self._norm = Program("norm", norm, "numbers")
        self._update = choose_update(
            rule, model.optimizer_params(), model.shapes, shardings, mesh, sharding.loads, sharding.logit_clips
        )
        # Donates argument 1, the average, because `without_fma` prepends the zero as an argument.
        average = jax.jit(without_fma(ema_update), out_shardings=shardings.params, donate_argnums=1)
        self._average = Program("average", average, "new state", elementwise=True)

    def _dispatch_to(self, devices: DeviceGroups | MeshWide) -> None:
        """Makes later calls compute microbatches on these devices."""
        self._computing = devices
        self._gradient, self._curvature = self._sums(devices)
        shares = [devices.divide_microbatches(plan) for plan in self.plans.values]
        # Each device adds its microbatches by itself.
        if isinstance(devices, DeviceGroups) or not all(of_plan.is_even for of_plan in shares):
            disable_cache_for([list(group.mesh.devices.flat) for group in self.devices.groups])

    def prepare(self, batch: Batch, step: int = 0) -> None:
        """Same as `compile`, but without returning programs. Does nothing in a rehearsal."""
        try:
            self._prepare(batch, step)
        except ProgramsDiffer as error:
            error.log_separate_programs()
            self._dispatch_to(self.devices)
            self._prepare(batch, step)

    def _prepare(self, batch: Batch, step: int) -> None:
        for sums in (self._curvature, self._gradient):
            if sums is not None:
                sums.prepare(batch, self.plans.at(step))

    def compile(self, batch: Batch, step: int = 0, *, observed: bool = False) -> Executable | Executables:
        """Compiles for rows of the same shape as in `batch`, in any number, and for the batch size of `step`."""
        del observed  # the gradient is a separate program in any case
        self.prepare(batch, step)
        return self._gradient.compile(batch, self.plans.at(step))

    def is_compiled(self, step: int) -> bool:
        """Returns true if this step needs no compilation."""
        return self._gradient.is_compiled(self.plans.at(step))

    def local_rows(self, step: int = 0) -> Sequence[int]:
        """Returns the indices of the rows of the global batch of `step` that this process needs."""
        return self.devices.local_rows(self.plans.at(step))

    def put(self, batch: Batch, step: int = 0) -> PlacedBatch:
        """Puts this process's rows of the global batch of `step` on their devices."""
        return self._computing.put(batch, self.plans.at(step))

    def gradient(self, state: TrainState, batch: PlacedBatch, tap: Tap | None = None) -> Sums:
        """Returns the sums of loss, weights, gradients and reported metrics over the global batch.

        `tap` receives the sums of every microbatch.
        """
        return self._gradient(self._prepare_params(state), batch, state.step, tap)

    def part_gradients(self, state: TrainState) -> PartGradients:
        """Returns the gradients of parts of a batch, for the weights of a state. Must be called after compiling."""
        rows, stages = self.plans.at(state.step).rows, self._gradient
        return PartGradients(stages, self._computing, self._prepare_params(state), rows, state.step, self._measured)

    def squares(self, grads: Params) -> jax.Array:
        """Returns the sum of squares of summed gradients, a float32 scalar, as in a step."""
        return wait_on_cpu(self._norm(grads))

    def recomputation(self, state: TrainState, batch: PlacedBatch) -> Recomputation:
        """Returns the first microbatch of each batch shard, to compute it on other devices."""
        positions = positions_of_groups(batch, 0)
        params = self._prepare_params(state)
        return Recomputation(self._gradient, self._computing, params, batch, positions, state.step)

    def _prepare_params(self, state: TrainState) -> PreparedParams:
        return self._gradient.prepare_params({**state.frozen, **state.params})

    def __call__(
        self,
        state: TrainState,
        batch: PlacedBatch,
        learning_rate: float,
        observer: Observer | None = None,
        check: CrossCheck | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Runs one step on a batch that was placed by `put`."""
        (scalars, grads), curvature = self._gradient_and_curvature(state, batch, check)
        # Called before the update, which consumes the state.
        observed = None if observer is None else observer.before_step(state)
        scalars = {
            **scalars,
            "squares": self.squares(grads),
            "learning_rate": self._replicate_scalar(np.float32(learning_rate)),
        }
        params, opt_state, metrics = self._update(state.params, state.opt_state, grads, curvature, scalars)
        done = TrainState(state.step + 1, params, opt_state, self._update_average(state, params), state.frozen)
        if observer is not None:
            observer.after_step(observed, split_params(grads, self._measured)[0], scalars["weight"], done)
        return done, metrics

    @cached_property
    def _zero(self) -> jax.Array:
        return self._replicate_scalar(np.uint32(0))

    def _replicate_scalar(self, value: np.generic) -> jax.Array:
        return replicate(value, self.devices.sharding.mesh)

    def _gradient_and_curvature(
        self, state: TrainState, batch: PlacedBatch, check: CrossCheck | None
    ) -> tuple[Sums, Params | None]:
        # Gathered parameters are freed when this function returns, which is before the update.
        params = self._prepare_params(state)
        if check is None:
            sums = self._gradient(params, batch, state.step, self._mark_progress(params, batch))
        else:
            sums = check.compute(self._gradient, self._computing, params, batch, state.step)
        if self._curvature is None or state.step % self._rule.optimizer.curvature_interval:
            return sums, None
        return sums, self._curvature(params, batch, state.step).tree

    def _mark_progress(self, params: PreparedParams, batch: PlacedBatch) -> Tap | None:
        """Marks the gathered parameters, and returns a function that marks the results of the last microbatches."""
        marker, gathered, plan = self.marker, params.gathered, batch.plan
        # With several groups of microbatches, processes wait for one another after each group.
        if marker is None or gathered is None or self._computing.divide_microbatches(plan).count != plan.count:
            return None
        marker("gathered", [min(arrays.values(), key=lambda x: x.size) for arrays in gathered])
        remaining = sum(map(len, batch.microbatches))
        results = dict[int, jax.Array]()

        def mark_last(group: int, microbatch: Microbatch, sums: Sums) -> None:
            nonlocal remaining
            del microbatch
            results[group] = next(iter(sums.scalars.values()))
            remaining -= 1
            if not remaining:
                marker("computed", [*results.values()])

        return mark_last

    def _update_average(self, state: TrainState, params: Params) -> Params | None:
        if state.averaged is None or self._rule.averaging is None:
            return None
        rate = self._replicate_scalar(np.float32(self._rule.averaging.rate(state.step + 1)))
        return self._average(self._zero, state.averaged, params, rate)


def _make_staged_sums(
    stages: StagesOf,
    estimate: StagesOf | None,
    model: ModelDef,
    trainable: Collection[str],
    devices: DeviceGroups | MeshWide,
) -> tuple[StagedSum, StagedSum | None]:
    """Makes the sums of the gradient and, if the optimizer uses one, of its curvature estimate."""
    gradient = StagedSum(stages, model, trainable, devices)
    if estimate is None:
        return gradient, None
    return gradient, StagedSum(estimate, model, trainable, devices, sums="estimates", prefix="curvature ")
