"""An optimizer step as a single program over the whole mesh, in which XLA chooses the order of additions.

This is the usual approach, and the baseline against which the cost of elastic determinism is measured. Bits depend on
the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.piecewise import Piecewise
from lm_trainer.optim.averaging import ema_update
from lm_trainer.parallel.collectives import batch_in_parts
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.mesh import BATCH_AXES, batch_shards
from lm_trainer.parallel.rehearsal import current_rehearsal, put_abstract
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.step.base import Marker, Observer, UpdateRule
from lm_trainer.step.check.cross_check import CrossCheck
from lm_trainer.step.dispatch.device_groups import DeviceGroups, pad_rows
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.model_parallel import shard_over_group
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.gather_where_read import GatherWhereRead
from lm_trainer.step.loss.gradient import LossFn, MicrobatchFn, Sums, curvature_sums, loss_and_gradient
from lm_trainer.step.state.model_def import ModelDef, Params
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import TrainState, abstract_state
from lm_trainer.step.updates.load import with_loads
from lm_trainer.step.updates.logit_clip import with_logit_clips
from lm_trainer.step.updates.split import split_params
from lm_trainer.step.updates.update import Metrics, make_update


class FastStep:
    """The `Step` of `determinism: fast`.

    Args:
        model: model to train.
        loss: loss of rows. It gets the rows of all devices at once.
        rule: update rule.
        sharding: shardings of the state.
        plans: divisions of the batches into microbatches; they matter only with `accumulate`.
        key: random key for dropout.
        accumulate: each device computes its microbatches one after another instead of all its rows at once.
    """

    loops = False
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
        accumulate: bool,
    ):
        self.plans, self.devices = plans, DeviceGroups(sharding)
        self._model, self._rule, self._sharding = model, rule, sharding
        self._shards, self._accumulate = batch_shards(sharding.mesh), accumulate
        for plan in plans.values:
            plan.microbatches_per_shard(sharding.mesh)
        self._key_data = jax.random.key_data(key)
        trainable = sharding.trained.params
        self._gather = GatherWhereRead(model, sharding)
        self._everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        self._maxima = {name for name, x in sharding.params.items() if x.combine == "maximum"}
        function = loss_and_gradient(model, loss, trainable)
        self._gradient: MicrobatchFn = shard_over_group(function, sharding.mesh, sharding.params, trainable)
        update = with_loads(make_update(rule.optimizer, rule.tx), sharding.loads)
        self._apply = with_logit_clips(update, sharding.logit_clips)
        state = (*sharding.trained, self._everywhere)
        # Parameters and optimizer state are donated, so that the new state reuses their memory.
        step = jax.jit(self._whole_step, out_shardings=state, donate_argnums=(0, 1))
        self._step = Program("step", step, "new state", grows=True, repeatable=False)
        # Gradients and estimates are rarely observed, so each has a separate program.
        self._sums = Program("gradient", self._jit_sums(self._gradient, stream=0), "gradients", grows=True)
        self._curvature = None
        if rule.curvature is not None:
            estimate = self._jit_sums(curvature_sums(model, rule.curvature, trainable), stream=1)
            self._curvature = Program("curvature", estimate, "estimates", grows=True)
        average = jax.jit(ema_update, out_shardings=trainable, donate_argnums=0)
        self._average = Program("average", average, "new state", elementwise=True)
        self._programs: dict[tuple[int, bool], Program] = {}

    def _jit_sums(self, function: MicrobatchFn, *, stream: int) -> jax.stages.Wrapped:
        def sums(params: Params, batch: Batch, step: jax.Array) -> Sums:
            return self._sum_over_batch(function, params, batch, step, stream)

        shardings: PyTree = (self._everywhere, dict(self._sharding.trained.params))
        return jax.jit(sums, out_shardings=Sums(*shardings))

    def prepare(self, batch: Batch, step: int = 0) -> None:
        """Same as `compile`, but without returning the program. Does nothing in a rehearsal."""
        if current_rehearsal() is None:
            self.compile(batch, step)

    def compile(self, batch: Batch, step: int = 0, *, observed: bool = False) -> Executable:
        """Compiles the step for rows of the same shape as in `batch` and for the batch size of `step`.

        With `observed`, also compiles the program that computes the gradient.
        """
        plan, state = self.plans.at(step), self._abstract_state()
        rows = self._global_shapes(batch, plan)
        if observed:
            self._sums.jitted.lower(
                {**state.frozen, **state.params}, rows, self._replicate_scalar(np.int32(0))
            ).compile()
        program = self._get_program((state.params, state.opt_state, state.frozen), rows, plan, None)
        assert program.executable is not None, "nothing is compiled in a rehearsal"
        return program.executable

    def _abstract_state(self) -> TrainState:
        averaged = self._rule.averaging is not None
        return abstract_state(self._model.shapes, self._rule.tx, self._sharding, averaged=averaged)

    def _global_shapes(self, batch: Batch, plan: MicrobatchPlan) -> Batch:
        """Returns the shapes of a global batch of `plan` whose rows have the shapes of those in `batch`."""
        rows = NamedSharding(self._sharding.mesh, PartitionSpec(BATCH_AXES))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((plan.rows * plan.count, *x.shape[1:]), x.dtype, sharding=rows), batch
        )

    def _get_program(
        self,
        state: tuple[Params, optax.OptState, Params],
        batch: Batch,
        plan: MicrobatchPlan,
        curvature: Params | None,
    ) -> Program:
        if current_rehearsal() is not None:
            return self._step
        kind = plan.batch_size, curvature is not None
        if kind not in self._programs:
            executable = self._step.compile(*state, batch, np.int32(0), np.float32(0), curvature)
            self._programs[kind] = replace(self._step, executable=executable)
        return self._programs[kind]

    def is_compiled(self, step: int) -> bool:
        """Returns true if this step needs no compilation."""
        return (self.plans.at(step).batch_size, False) in self._programs

    def local_rows(self, step: int = 0) -> Sequence[int]:
        """Returns the indices of the rows of the global batch of `step` that this process needs."""
        return self.devices.local_rows(self.plans.at(step))

    def put(self, batch: Batch, step: int = 0) -> Batch:
        """Puts this process's rows of the global batch of `step` into arrays that are sharded over the devices."""
        plan, mesh = self.plans.at(step), self._sharding.mesh
        rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        local = pad_rows(batch, plan.microbatches_per_shard(mesh) * plan.rows * len(self.devices.groups))
        global_rows = plan.rows * plan.count
        if (rehearsed := put_abstract(self._global_shapes(batch, plan), rows, "batch")) is not None:
            return rehearsed
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(rows, np.asarray(x), (global_rows, *np.shape(x)[1:])),
            local,
        )

    def gradient(self, state: TrainState, batch: Batch) -> Sums:
        """Returns the sums of loss, weights, gradients and reported metrics over the global batch."""
        return wait_on_cpu(
            self._sums({**state.frozen, **state.params}, batch, self._replicate_scalar(np.int32(state.step)))
        )

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        learning_rate: float,
        observer: Observer | None = None,
        check: CrossCheck | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Runs one step on a batch that was placed by `put`."""
        if check is not None:
            raise ValueError("one program over all devices has no results of single devices to compare")
        curvature = None
        if self._curvature is not None and state.step % self._rule.optimizer.curvature_interval == 0:
            everything = {**state.frozen, **state.params}
            curvature = wait_on_cpu(
                self._curvature(everything, batch, self._replicate_scalar(np.int32(state.step)))
            ).tree
        # Called before the step, which consumes the parameters.
        observed = None if observer is None else (observer.before_step(state), self.gradient(state, batch))
        arrays = (state.params, state.opt_state, state.frozen)
        program = self._get_program(arrays, batch, self.plans.at(state.step), curvature)
        step, rate = self._replicate_scalar(np.int32(state.step)), self._replicate_scalar(np.float32(learning_rate))
        params, opt_state, metrics = wait_on_cpu(program(*arrays, batch, step, rate, curvature))
        averaged = state.averaged
        if averaged is not None and self._rule.averaging is not None:
            average_rate = self._replicate_scalar(np.float32(self._rule.averaging.rate(state.step + 1)))
            averaged = self._average(averaged, params, average_rate)
        done = TrainState(state.step + 1, params, opt_state, averaged, state.frozen)
        if observer is not None and observed is not None:
            values, sums = observed
            grads = split_params(sums.tree, self._sharding.measured)[0]
            observer.after_step(values, grads, sums.scalars["weight"], done)
        return done, metrics

    def _replicate_scalar(self, value: np.generic) -> jax.Array:
        return replicate(value, self._sharding.mesh)

    def _whole_step(  # noqa: PLR0913 - the inputs of a step
        self,
        params: Params,
        opt_state: optax.OptState,
        frozen: Params,
        batch: Batch,
        step: jax.Array,
        learning_rate: jax.Array,
        curvature: Params | None,
    ) -> tuple[Params, optax.OptState, Metrics]:
        scalars, grads = self._sum_over_batch(self._gradient, {**frozen, **params}, batch, step)
        optimized = split_params(grads, self._sharding.measured)[0]
        squares = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in optimized.values())
        inputs = {**scalars, "squares": squares, "learning_rate": learning_rate}
        return self._apply(params, opt_state, grads, curvature, inputs)

    def _sum_over_batch(
        self, function: MicrobatchFn, params: Params, batch: Batch, step: jax.Array, stream: int = 0
    ) -> Sums:
        """Sums `function` over the batch. `stream` separates the random numbers of different functions."""
        mesh = self._sharding.mesh
        key = jax.random.wrap_key_data(self._key_data)
        key = jax.random.fold_in(jax.random.fold_in(key, stream) if stream else key, step)
        # Traced for all rows at once, because only the set of parameters that are read matters.
        gathered = self._gather.gather_unread(function, params, batch, key)

        def sum_chunk(rows: Batch, index: jax.Array | int) -> Sums:
            with batch_in_parts(self._shards), self._gather.gather_on_read():
                scalars, tree = function(gathered, rows, jax.random.fold_in(key, index))
            storage = self._sharding.storage
            # In storage sharding, so that XLA may reduce-scatter gradients and no device holds them unsharded.
            return Sums(scalars, {n: jax.lax.with_sharding_constraint(g, storage[n]) for n, g in tree.items()})

        chunks = batch.tokens.shape[0] // (self._shards * self._rows_at_once(batch.tokens.shape[0]))
        if chunks == 1:
            return sum_chunk(batch, 0)

        def split(x: jax.Array) -> jax.Array:
            # Each device splits its own rows, so no row moves to another device.
            parts = jnp.moveaxis(x.reshape(self._shards, chunks, -1, *x.shape[1:]), 1, 0)
            parts = parts.reshape(chunks, -1, *x.shape[1:])
            return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, BATCH_AXES)))

        def add(total: Sums, item: tuple[Batch, jax.Array]) -> tuple[Sums, None]:
            chunk = sum_chunk(*item)
            scalars = jax.tree.map(jnp.add, total.scalars, chunk.scalars)
            tree = {
                name: (jnp.maximum if name in self._maxima else jnp.add)(x, chunk.tree[name])
                for name, x in total.tree.items()
            }
            return Sums(scalars, tree), None

        items = (jax.tree.map(split, batch), jnp.arange(chunks))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sum_chunk, batch, 0))
        lowest = {name: jnp.full_like(x, -jnp.inf) for name, x in zero.tree.items() if name in self._maxima}
        return jax.lax.scan(add, Sums(zero.scalars, {**zero.tree, **lowest}), items)[0]

    def _rows_at_once(self, rows: int) -> int:
        """Returns the number of rows that each device computes at once, of a batch of `rows` rows."""
        if not self._accumulate:
            return rows // self._shards
        return next(plan.rows for plan in self.plans.values if plan.rows * plan.count == rows)
