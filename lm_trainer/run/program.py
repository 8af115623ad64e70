"""From a configuration to what runs: the model, its param_sharding on the devices, the compiled step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.models.peft import module_names
from lm_trainer.nn.curvature import gauss_newton_bartlett, hutchinson
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.lora import attach, is_adapter
from lm_trainer.nn.loss import token_loss_and_metrics
from lm_trainer.nn.quantize import quantize
from lm_trainer.optim import OptimizerConfig, Param
from lm_trainer.parallel.mesh import BATCH_AXES, build_mesh
from lm_trainer.parallel.sharding import plan_shardings
from lm_trainer.run.config import RunConfig
from lm_trainer.run.trainer_config import TrainerConfig
from lm_trainer.step.elastic import CurvatureFn, ElasticStep, LossFn, Step, UpdateRule
from lm_trainer.step.evaluate import Evaluator
from lm_trainer.step.fast import FastStep
from lm_trainer.step.model_parallel import axes_in_use, check_group_axes
from lm_trainer.step.state import (
    ModelDef,
    Params,
    StateSharding,
    TrainState,
    fresh_state,
    plan_state_sharding,
    state_from_params,
)

_INIT, _DROPOUT, _ADAPTER = 0, 1, 2

Selection = bool | Mapping[str, bool] | Callable[[str], bool]
"""Which parameters, by dotted name; a name that a mapping lacks is not among them."""

_DRAWN_TOGETHER = 1024
"""Tokens whose logits exist at a time while targets are drawn; another number would draw others."""

AVERAGED = "ema"
"""The name of the averaged weights among those that are evaluated."""


@dataclass(frozen=True)
class Program:
    """Everything of a run that is neither state nor data."""

    model: ModelDef
    sharding: StateSharding
    optimizer: OptimizerConfig
    tx: optax.GradientTransformationExtraArgs
    step: Step
    evaluate: Evaluator
    averages: bool
    """Whether the state has averaged weights."""
    freezes: bool
    """Whether some parameters are not trained."""

    @property
    def averages_by_itself(self) -> bool:
        """Whether the optimizer means other weights than those that it updates."""
        return type(self.optimizer).eval_params is not OptimizerConfig.eval_params

    def init(self) -> TrainState:
        """The fresh state of the run; it depends on the seed alone, or on the weights that the model starts from."""
        if self.model.load is None:
            return fresh_state(self.model.init, self.tx, self.sharding, averaged=self.averages)
        storage = self.sharding.storage
        params = self.model.load(self.model.shapes, storage)
        if others := {name: sharding for name, sharding in storage.items() if name not in params}:
            fresh = jax.jit(lambda: {n: x for n, x in self.model.init().items() if n in others}, out_shardings=others)
            params = {**params, **fresh()}
        return self.from_weights(params)

    def from_weights(self, params: Mapping[str, np.ndarray | jax.Array]) -> TrainState:
        """A state at step 0 with given weights, all of them."""
        return state_from_params(params, self.tx, self.sharding, averaged=self.averages)

    def weights(self, state: TrainState) -> dict[str, Params]:
        """What to evaluate and export: the model as the optimizer means it under "", averaged weights by their name.

        The last entry is the one to export. Parameters that are not trained are among them.
        """
        params = state.params
        if self.averages_by_itself:
            param_sharding = self.sharding.state.params
            params = jax.jit(self.optimizer.eval_params, out_shardings=param_sharding)(state.params, state.opt_state)
        sets = {"": params} if state.averaged is None else {"": params, AVERAGED: state.averaged}
        return {name: {**state.frozen, **weights} for name, weights in sets.items()}


def build_program(config: RunConfig, vocab_size: int, devices: Sequence[Any] | None = None) -> Program:
    """Plans the run of a configuration on `devices`, by default all; nothing is compiled or allocated yet.

    Raises:
        UserError: as `plan_program`.
    """
    model = trace_model(config, vocab_size)
    return plan_program(config.trainer, config.optimizer, model, loss_function(config), devices=devices)


def plan_program(
    trainer: TrainerConfig,
    optimizer: OptimizerConfig,
    model: ModelDef,
    loss: LossFn,
    *,
    key: jax.Array | None = None,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Plans training of a model on `devices`, by default all; nothing is compiled or allocated yet.

    Args:
        trainer: batch, precision, sharding.
        optimizer: what updates the weights.
        model: what is trained.
        loss: of a microbatch.
        key: for the random numbers of training, such as dropout; by default of the seed.
        devices: where.

    Raises:
        UserError: when the devices cannot share the batch, or a sharding rule does not fit the model.
    """
    mesh = build_mesh(trainer.mesh_shape(), devices or _devices(trainer))
    plans = trainer.microbatches()
    _check_cut(trainer, optimizer, model, mesh)
    param_shardings = plan_shardings(
        {name: (x.shape, model.axes[name]) for name, x in model.shapes.items()},
        mesh,
        param_rules=trainer.param_rules(),
        compute_rules=trainer.compute_rules(),
        max_shards=math.gcd(*(plan.count for plan in plans.values)),
    )
    trained = {name: x for name, x in model.shapes.items() if name in model.trainable}
    tx = optimizer.build({name: Param(name, x.shape, model.axes[name]) for name, x in trained.items()})
    sharding = plan_state_sharding(trained, tx, param_shardings, mesh)
    rule = UpdateRule(optimizer, tx, trainer.model_averaging, _curvature(optimizer, loss, trainer.mp.compute_dtype))
    key = jax.random.fold_in(jax.random.key(trainer.seed), _DROPOUT) if key is None else key
    if trainer.determinism == "fast":
        accumulate = trainer.per_device_parallelism != -1
        step: Step = FastStep(model, loss, rule, sharding=sharding, plans=plans, key=key, accumulate=accumulate)
    else:
        step = ElasticStep(model, loss, rule, sharding=sharding, plans=plans, key=key)
    return Program(
        model=model,
        sharding=sharding,
        optimizer=optimizer,
        tx=tx,
        step=step,
        evaluate=Evaluator(model, loss, step.devices, trainer.eval_plan()),
        averages=trainer.model_averaging is not None,
        freezes=len(trained) < len(model.shapes),
    )


def _check_cut(trainer: TrainerConfig, optimizer: OptimizerConfig, model: ModelDef, mesh: Mesh) -> None:
    """Refuses what the axes that cut a microbatch cannot do."""
    axes = axes_in_use(mesh.shape)
    if not axes:
        return
    built = nnx.eval_shape(model.build)
    check_group_axes(built.spec if isinstance(built, Decoder) else None, trainer.microbatch_rows(), mesh.shape)
    if optimizer.curvature is not None:
        raise UserError(f"{axes[0]}_axis_size cannot be used with an optimizer that estimates curvature; set it to 1")


def _curvature(optimizer: OptimizerConfig, loss: LossFn, dtype: Any) -> CurvatureFn | None:
    """The estimate that the optimizer takes."""
    match optimizer.curvature:
        case None:
            return None
        case "hutchinson":
            return functools.partial(hutchinson, loss)
        case "gauss_newton_bartlett":
            return functools.partial(gauss_newton_bartlett, loss, dtype=dtype, block_size=_DRAWN_TOGETHER)


def check_devices(trainer: TrainerConfig) -> None:
    """Finds early, before any data is read, that the devices do not fit the configuration.

    Raises:
        UserError: as `plan_program`.
    """
    mesh = build_mesh(trainer.mesh_shape(), _devices(trainer))
    if trainer.require_accelerator and mesh.devices.flat[0].platform == "cpu":
        raise UserError("trainer.require_accelerator is set, but JAX sees no accelerator, only CPUs")
    for plan in trainer.microbatches().values:
        plan.per_shard(mesh)


def _devices(trainer: TrainerConfig) -> Sequence[Any]:
    found = jax.devices()
    if trainer.max_devices is not None and trainer.max_devices < len(found) and jax.process_count() > 1:
        raise UserError(
            f"trainer.max_devices: {trainer.max_devices} of {len(found)} devices would leave processes idle; start "
            f"fewer processes"
        )
    return found[: trainer.max_devices]


def trace_model(config: RunConfig, vocab_size: int) -> ModelDef:
    """The model of a configuration; its initial values follow from the seed."""
    key = jax.random.fold_in(jax.random.key(config.trainer.seed), _INIT)
    quantization, adapter = config.trainer.quantization, config.adapter
    names = {} if adapter is None else module_names(config.model, vocab_size)

    def build() -> nnx.Module:
        model = config.model.build(vocab_size, rngs=nnx.Rngs(key))
        if adapter is not None:
            attach(model, adapter, names, rngs=nnx.Rngs(jax.random.fold_in(key, _ADAPTER)))
        if quantization is not None:
            quantize(model, quantization)
        return model

    return trace_module(build, config.trainer.mp.param_dtype, True if adapter is None else is_adapter)


def trace_module(build: Callable[[], nnx.Module], param_dtype: Any, is_trainable: Selection = True) -> ModelDef:
    """A model with the parameter dtype of the precision policy; see `ModelDef.trace`."""

    def cast() -> nnx.Module:
        model = build()
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param):
                variable.set_value(variable.get_value().astype(param_dtype))
        return model

    if isinstance(is_trainable, bool):
        return ModelDef.trace(cast, lambda _: is_trainable)
    if isinstance(is_trainable, Mapping):
        return ModelDef.trace(cast, lambda name: is_trainable.get(name, False))
    return ModelDef.trace(cast, is_trainable)


def loss_function(config: RunConfig) -> LossFn:
    """The training loss in the compute dtype of the configuration."""
    return next_token_loss(config.trainer.mp.compute_dtype, config.model.cross_entropy_block_size)


def next_token_loss(dtype: Any, block_size: int | None = None) -> LossFn:
    """Cross-entropy of the next token, for a `Decoder`.

    Args:
        dtype: of the computation.
        block_size: as for `token_loss_and_metrics`.
    """

    def loss(model: nnx.Module, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, dict]:
        return token_loss_and_metrics(model, batch, dtype=dtype, key=key, block_size=block_size)  # pyright: ignore[reportArgumentType]

    return loss


def describe_mesh(mesh: Mesh) -> str:
    """For people: `8 x cpu: data 8` or `1 x NVIDIA H200`."""
    kind = mesh.devices.flat[0].device_kind
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.devices.size} x {kind}" + (f": {sizes}" if sizes else "")


def caveats(trainer: TrainerConfig, mesh: Mesh) -> Iterator[str]:
    """What a user should know of a configuration that can be meant, but need not be."""
    if instead := promise(trainer, mesh):
        yield instead
    if "float16" in (trainer.mp.param, trainer.mp.compute):
        yield "trainer.mp: float16 overflows at 65,504, and no loss is scaled; bfloat16 has the range of float32"
    elif trainer.mp.param == "bfloat16":
        yield (
            "trainer.mp: weights and the optimizer's state are bfloat16, which loses small updates; p=f32,c=bfloat16 "
            "keeps them in float32 and computes in bfloat16"
        )


def promise(trainer: TrainerConfig, mesh: Mesh) -> str | None:
    """What is promised instead of the same bits on every mesh; None where nothing is lost."""
    if trainer.determinism == "fast":
        return (
            "determinism: fast lets XLA add in an order of its own: bits are equal only for the same devices, in the "
            "same processes and with the same mesh; on others the losses are close, and part over the steps"
        )
    names = {
        "model": "tensor parallelism",
        "context": "shared positions",
        "expert": "shared experts",
        "pipeline": "pipeline stages",
    }
    axes = [axis for axis in names if mesh.shape[axis] > 1]
    if not axes:
        return None
    if "model" in axes and not any("model" in over for over in trainer.compute_rules().values()):
        return (
            f"model_axis_size={mesh.shape['model']} cuts no computation, so that the devices along it all compute the "
            f"same: name what they are to share as tensor_parallel_axes, such as [heads, mlp, vocab]"
        )
    dropout = "" if axes == ["model"] else " and draw dropout of their own"
    sizes = ", ".join(f"{axis}_axis_size={mesh.shape[axis]}" for axis in axes)
    return (
        f"with {' and '.join(names[axis] for axis in axes)}, several devices add inside a microbatch{dropout}: bits "
        f"are equal for {sizes} and any sizes of {', '.join(BATCH_AXES)}, and close, not equal, to those of other sizes"
    )
