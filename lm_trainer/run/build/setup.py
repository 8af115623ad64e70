"""Builds the parts of a run from its configuration: model, shardings, optimizer, training step and evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.nn.curvature import (
    gauss_newton_bartlett,
    hutchinson,
    staged_gauss_newton_bartlett,
    with_dropout_key,
)
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.nf4 import num_weights
from lm_trainer.nn.stages import StagedLoss
from lm_trainer.optim import Optimizer
from lm_trainer.optim.schedule import Schedule
from lm_trainer.parallel.sharding import plan_shardings
from lm_trainer.run.build.model import (
    DROPOUT_KEY,
    NextTokenLoss,
    SplittableLoss,
    TokenNll,
    evaluation_loss,
    loss_function,
    trace_model,
)
from lm_trainer.run.config.gather import resolve_gather, with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.step_plan import StepPlan
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.base import Observer, Step, UpdateRule
from lm_trainer.step.check.cross_check import CrossCheck
from lm_trainer.step.dispatch.model_parallel_limits import check_model_parallel, model_parallel_axes
from lm_trainer.step.dispatch.recorder import Measure
from lm_trainer.step.elastic import CurvatureStages, ElasticStep
from lm_trainer.step.evaluate import Evaluator
from lm_trainer.step.fast import FastStep
from lm_trainer.step.loss.gradient import CurvatureFn, LossFn
from lm_trainer.step.rehearse import RehearsedStep, StepRecord
from lm_trainer.step.staged.hutchinson import Hutchinson
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.state.model_def import ModelDef, Params
from lm_trainer.step.state.state_sharding import StateSharding, plan_state_sharding
from lm_trainer.step.state.train_state import TrainState, fresh_params, fresh_state, state_from_params
from lm_trainer.step.updates.split import split_params
from lm_trainer.step.updates.update import Metrics

_SAMPLING_BLOCK = 1024
"""Number of tokens whose logits are computed at a time while targets are sampled. Changing it changes the samples."""

AVERAGED = "ema"
"""Name of the averaged weights in evaluations."""


@dataclass(frozen=True)
class TrainingSetup:
    """All parts of a run except for its state and its data."""

    model: ModelDef
    sharding: StateSharding
    optimizer: Optimizer
    tx: optax.GradientTransformationExtraArgs
    step: Step
    evaluate: Evaluator
    plan: StepPlan
    """The resolved trainer section."""
    schedule: Schedule | None
    """Learning rate as a function of the number of completed steps; None if the optimizer has an internal schedule."""
    averages: bool
    """True if the state contains averaged weights."""
    freezes: bool
    """True if some parameters are frozen."""
    gathers_layers: bool
    """True if a step gathers the parameters of one layer at a time."""

    @property
    def has_eval_params(self) -> bool:
        """True if the optimizer evaluates different weights than those that it updates."""
        return type(self.optimizer).eval_params is not Optimizer.eval_params

    def init(self) -> TrainState:
        """Returns the state at step 0, with the weights that the model definition loads, or with random weights."""
        return self.init_from_seed() if self.model.load is None else self.init_from_model()

    def init_from_seed(self) -> TrainState:
        """Returns a randomly initialized state, which is determined by the seed."""
        return fresh_state(self.model.init, self.tx, self.sharding, averaged=self.averages)

    def init_from_model(self) -> TrainState:
        """Returns a state at step 0 with the weights that the model definition loads, such as Hugging Face weights.

        Parameters that are missing in these weights, such as the parameters of an adapter, are randomly initialized.
        """
        assert self.model.load is not None
        storage = self.sharding.storage
        params = self.model.load(self.model.shapes, storage)
        if missing := storage.keys() - params.keys():
            params = {
                **params,
                **fresh_params(lambda: {n: x for n, x in self.model.init().items() if n in missing}, self.sharding),
            }
        return self.from_weights(params)

    def rehearse(self, row: Batch, platform: str, measure: Measure, limit: int | None = None) -> StepRecord:
        """Rehearses the step with the highest memory use. For the arguments see `RehearsedStep.record`."""
        interval = self.optimizer.curvature_interval if self.optimizer.curvature is not None else 1
        step = RehearsedStep(self.step, self.model.shapes, self.tx, self.sharding, self.averages, interval)
        return step.record(row, platform, measure, limit)

    def take_step(
        self, state: TrainState, batch: Batch, observer: Observer | None = None, check: CrossCheck | None = None
    ) -> tuple[TrainState, Metrics]:
        """Runs one training step on a batch in host memory.

        Args:
            state: state before the step. Its arrays are donated.
            batch: rows of this process in the global batch, as NumPy arrays.
            observer: receives intermediate values of the step.
            check: checks the devices during the step.

        Raises:
            HardwareError: if the check fails. The state before the step is still valid.
        """
        return self.compute_step(state, self.step.put(batch, state.step), observer, check)

    def learning_rate(self, step: int) -> float | None:
        """Returns the learning rate after `step` steps, or None if the optimizer has an internal schedule."""
        return None if self.schedule is None else self.schedule(step)

    def compute_step(
        self, state: TrainState, placed: Any, observer: Observer | None = None, check: CrossCheck | None = None
    ) -> tuple[TrainState, Metrics]:
        """Like `take_step`, but for a batch that `step.put` has already placed on the devices."""
        return self.step(state, placed, self.learning_rate(state.step) or 0.0, observer, check)

    def from_weights(self, params: Mapping[str, np.ndarray | jax.Array]) -> TrainState:
        """Returns a state at step 0 with the given weights, which must be complete."""
        return state_from_params(params, self.tx, self.sharding, averaged=self.averages)

    def weights_to_evaluate(self, state: TrainState) -> dict[str, Params]:
        """Returns the sets of weights to evaluate, by name.

        The entry "" contains the optimizer's evaluation weights, and the entry `AVERAGED` the averaged weights. The
        last entry contains the weights to export. Frozen parameters are included.
        """
        params = state.params
        if self.has_eval_params:
            others, measured = split_params(state.params, self.model.measured)
            param_sharding = {name: self.sharding.trained.params[name] for name in others}
            evaluated = jax.jit(self.optimizer.eval_params, out_shardings=param_sharding)(others, state.opt_state)
            params = {**evaluated, **measured}
        sets = {"": params} if state.averaged is None else {"": params, AVERAGED: state.averaged}
        return {name: {**state.frozen, **weights} for name, weights in sets.items()}


def build_setup(config: RunConfig, vocab_size: int, devices: Sequence[Any] | None = None) -> TrainingSetup:
    """Plans the run of a configuration on `devices` (all by default), without compiling programs or allocating memory.

    Raises:
        UserError: as for `plan_training`.
    """
    config = with_resolved_gather(config, vocab_size)
    return setup_from_config(config, config.trainer, trace_model(config, vocab_size), devices=devices)


def setup_from_config(
    config: RunConfig, trainer: TrainerConfig, model: ModelDef, *, devices: Sequence[Any] | None = None
) -> TrainingSetup:
    """Plans the run of a configuration, but with the given trainer section and model; see `plan_training`."""
    return plan_training(
        trainer,
        config.optimizer,
        model,
        loss_function(config),
        eval_loss=evaluation_loss(config),
        devices=devices,
        seq_len=config.model.seq_len,
    )


def plan_training(  # noqa: PLR0913 - the parts of a run a user can supply
    trainer: TrainerConfig,
    optimizer: Optimizer,
    model: ModelDef,
    loss: LossFn,
    *,
    eval_loss: LossFn | None = None,
    key: jax.Array | None = None,
    devices: Sequence[Any] | None = None,
    seq_len: int | None = None,
) -> TrainingSetup:
    """Plans the training of a model on `devices` (all by default), without compiling programs or allocating memory.

    Args:
        trainer: batch, precision and sharding settings.
        optimizer: optimizer of the trained parameters.
        model: the model to train.
        loss: loss of a microbatch.
        eval_loss: loss of a microbatch in evaluations; None means `loss`.
        key: key for random numbers in training, such as dropout; None derives it from the seed.
        devices: devices to compute on.
        seq_len: number of positions in a row, for schedules that count tokens.

    Raises:
        UserError: if the batch cannot be distributed over the devices, or a sharding rule does not fit the model.
    """
    if optimizer.logit_limit is not None and not model.logit_clips:
        raise UserError(
            "optimizer.qk_clip needs a model that lm_trainer builds from a configuration, whose attention it can "
            "measure; remove it"
        )
    num_params = sum(num_weights(name, x.shape) for name, x in model.shapes.items())
    trainer = resolve_gather(trainer, num_params, layers=_has_known_layers(loss, model))
    plan = trainer.step_plan
    mesh = plan.mesh(devices or trainer.devices())
    _check_model_parallel(plan, optimizer, model, mesh)
    tx, sharding = shard_state(plan, optimizer, model, mesh)
    curvature = _curvature_estimator(optimizer, loss, plan.policy.compute_dtype)
    owned = trainer.matrix_updates == "owned"
    rule = UpdateRule(optimizer, tx, trainer.model_averaging, curvature, owned)
    # The key differs from the key of the initial weights, because different uses of the seed must draw different
    # numbers.
    key = jax.random.fold_in(jax.random.key(trainer.seed), DROPOUT_KEY) if key is None else key
    common = {"sharding": sharding, "plans": plan.microbatches, "key": key}
    staged = eval_staged = None
    if trainer.gathers_layers:
        staged, eval_staged = (
            split_loss_into_stages(loss, model, mesh),
            split_loss_into_stages(eval_loss or loss, model, mesh),
        )
    if trainer.bitwise:
        step: Step = ElasticStep(
            model,
            loss,
            rule,
            **common,
            staged=staged,
            curvature_stages=None if staged is None else _staged_curvature_estimator(optimizer, staged),
            microbatches_per_gather=trainer.microbatches_per_gather,
        )
    else:
        step = FastStep(model, loss, rule, **common, accumulate=trainer.per_device_parallelism != -1)
    tokens = None if seq_len is None else TokenSchedule(plan.batch_schedule, seq_len)
    return TrainingSetup(
        model=model,
        sharding=sharding,
        optimizer=optimizer,
        tx=tx,
        step=step,
        evaluate=Evaluator(model, eval_loss or loss, step.devices, plan.evaluation, staged=eval_staged),
        plan=plan,
        schedule=optimizer.schedule(trainer.num_train_steps, tokens),
        averages=trainer.model_averaging is not None,
        freezes=len(model.trainable) < len(model.shapes),
        gathers_layers=staged is not None,
    )


def shard_state(
    plan: StepPlan, optimizer: Optimizer, model: ModelDef, mesh: Any
) -> tuple[optax.GradientTransformationExtraArgs, StateSharding]:
    """Returns the optimizer's gradient transformation for a model, and the sharding of the training state.

    Args:
        plan: the resolved trainer section.
        optimizer: the optimizer.
        model: the model to train.
        mesh: mesh of devices, or an abstract mesh with the same axes. Only the sizes are used.

    Raises:
        UserError: if a sharding rule does not fit the model.
    """
    param_shardings = plan_shardings(
        {name: (x.shape, model.axes[name]) for name, x in model.shapes.items()},
        mesh,
        param_rules=plan.param_rules,
        compute_rules=plan.compute_rules,
        # The maximum number of shards is the same for every batch, so that sums keep one order during the whole run.
        max_shards=math.gcd(*(p.count for p in plan.microbatches.values)),
    )
    trained = {name: x for name, x in model.shapes.items() if name in model.trainable}
    tx = optimizer.build(model.optimizer_params())
    param_shardings |= {name: param_shardings[name].as_maximum() for name in model.logit_clips}
    if model.measured:
        # The state of the optimizer has no arrays for parameters that it does not update.
        init = tx.init
        tx = tx._replace(init=lambda params: init(split_params(params, model.measured)[0]))
    sharding = plan_state_sharding(trained, tx, param_shardings, mesh)
    return tx, dataclasses.replace(sharding, loads=model.loads, logit_clips=model.logit_clips)


def _check_model_parallel(plan: StepPlan, optimizer: Optimizer, model: ModelDef, mesh: Mesh) -> None:
    """Raises `UserError` if model, optimizer or microbatches do not support the model-parallel axes of the mesh."""
    axes = model_parallel_axes(mesh.shape)
    if not axes:
        return
    built = nnx.eval_shape(model.build)
    check_model_parallel(built.spec if isinstance(built, Decoder) else None, plan.microbatch_rows, mesh.shape)
    if optimizer.curvature is not None:
        raise UserError(
            f"{axes[0]}_axis_size gives each device a part of a microbatch, but the optimizer estimates curvature from "
            f"random numbers drawn for whole microbatches; set it to 1, and share weights by the data axis or "
            f"model_axis_size"
        )


def _has_known_layers(loss: LossFn, model: ModelDef) -> bool:
    """Returns True if `trainer.gather: auto` may gather one layer at a time; see `with_resolved_gather`."""
    if isinstance(loss, StagedLoss):
        return True
    built, is_known_loss = nnx.eval_shape(model.build), isinstance(loss, NextTokenLoss | TokenNll)
    return isinstance(built, Decoder) and is_known_loss and built.spec.encoder is None


def split_loss_into_stages(loss: LossFn, model: ModelDef, mesh: Mesh) -> StagedLoss:
    """Returns the loss in stages, for `trainer.gather: layer`. Raises `UserError` for unsupported models and losses."""
    if isinstance(loss, StagedLoss):
        return loss
    built = nnx.eval_shape(model.build)
    if not (isinstance(built, Decoder) and isinstance(loss, SplittableLoss)):
        raise UserError(
            "trainer.gather: layer needs a decoder and a loss of lm_trainer, not a model or loss of your own, unless "
            "that is an lm_trainer.nn.stages.StagedLoss; use model"
        )
    if "pipeline" in model_parallel_axes(mesh.shape):
        raise UserError(
            "trainer.gather: layer takes one layer after another through all devices, each of which keeps a "
            "part of every layer: pipeline_axis_size would save no memory and leave devices waiting. Set it to 1, or "
            "use model"
        )
    return loss.split_into_stages(built)


def _curvature_estimator(optimizer: Optimizer, loss: LossFn, dtype: Any) -> CurvatureFn | None:
    """Returns the curvature estimator that the optimizer requires, or None."""
    match optimizer.curvature:
        case None:
            return None
        case "hutchinson":
            return functools.partial(hutchinson, loss)
        case "gauss_newton_bartlett":
            return functools.partial(gauss_newton_bartlett, loss, dtype=dtype, block_size=_SAMPLING_BLOCK)


def _staged_curvature_estimator(optimizer: Optimizer, loss: StagedLoss) -> CurvatureStages | None:
    """Returns the curvature estimator that the optimizer requires in stages, or None."""

    def split(loss: StagedLoss) -> Callable[..., SplitLoss]:
        # Curvature estimates do not log metrics.
        return lambda model, key_data, trainable: SplitLoss(model, loss, key_data, trainable, logs=False)

    match optimizer.curvature:
        case None:
            return None
        case "hutchinson":
            with_dropout = split(with_dropout_key(loss))
            return lambda *args: Hutchinson(with_dropout(*args)).stages
        case "gauss_newton_bartlett":
            sampled = split(staged_gauss_newton_bartlett(loss, block_size=_SAMPLING_BLOCK))
            return lambda *args: sampled(*args).stages


def check_devices(trainer: TrainerConfig) -> None:
    """Checks early, before any data is read, that the configuration fits the devices.

    Raises:
        UserError: as for `plan_training`, or if an accelerator is required but not available.
    """
    plan = trainer.step_plan
    mesh = trainer.device_mesh
    if trainer.require_accelerator and mesh.devices.flat[0].platform == "cpu":
        raise UserError("trainer.require_accelerator is set, but JAX sees no accelerator, only CPUs")
    plan.check_microbatch_shares(mesh)
