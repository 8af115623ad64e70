"""From a configuration to what runs: the model, its layout on the devices, the compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from lm_trainer.config.run import RunConfig
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.layout import plan_layout
from lm_trainer.core.mesh import BATCH_AXES, build_mesh
from lm_trainer.evaluate import Evaluator
from lm_trainer.nn.loss import token_loss
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.optim import Param
from lm_trainer.optim.schedule import Schedule
from lm_trainer.train_state import ModelDef, Placement, TrainState, init_state, place_state
from lm_trainer.train_step import LossFn, TrainStep

_INIT, _DROPOUT = 0, 1


@dataclass(frozen=True)
class Program:
    """Everything of a run that is neither state nor data."""

    spec: DecoderSpec
    model: ModelDef
    placement: Placement
    tx: optax.GradientTransformationExtraArgs
    schedule: Schedule
    step: TrainStep
    evaluate: Evaluator

    def init(self) -> TrainState:
        """The fresh state of the run; it depends on the seed alone."""
        return init_state(self.model.init, self.tx, self.placement.shardings)


def build_program(config: RunConfig, vocab_size: int, devices: Sequence[Any] | None = None) -> Program:
    """Plans the run on `devices`, by default all; nothing is compiled or allocated yet.

    Raises:
        UserError: when the devices cannot share the batch, or a sharding rule does not fit the model.
    """
    trainer = config.trainer
    mesh = build_mesh(trainer.mesh_shape(), devices or jax.devices())
    plan = trainer.microbatches()
    key = jax.random.key(trainer.seed)
    model = trace_model(config, vocab_size, jax.random.fold_in(key, _INIT))
    layouts = plan_layout(
        {name: (x.shape, model.axes[name]) for name, x in model.shapes.items()},
        mesh,
        param_rules=trainer.param_rules(),
        compute_rules=trainer.compute_rules(),
        max_shards=plan.count,
    )
    tx = config.optimizer.build({name: Param(name, x.shape, model.axes[name]) for name, x in model.shapes.items()})
    placement = place_state(model.shapes, tx, layouts, mesh)
    loss = loss_function(config)
    step = TrainStep(
        model,
        loss,
        tx,
        placement=placement,
        plan=plan,
        key=jax.random.fold_in(key, _DROPOUT),
    )
    return Program(
        spec=config.model.spec(vocab_size),
        model=model,
        placement=placement,
        tx=tx,
        schedule=config.optimizer.schedule(trainer.num_train_steps),
        step=step,
        evaluate=Evaluator(model, loss, step, trainer.eval_rows),
    )


def check_devices(config: RunConfig) -> None:
    """Finds early, before any data is read, that the devices do not fit the configuration.

    Raises:
        UserError: as `build_program`.
    """
    trainer = config.trainer
    mesh = build_mesh(trainer.mesh_shape(), jax.devices())
    if trainer.require_accelerator and mesh.devices.flat[0].platform == "cpu":
        raise UserError("trainer.require_accelerator is set, but JAX sees no accelerator, only CPUs")
    trainer.microbatches().per_shard(mesh)


def trace_model(config: RunConfig, vocab_size: int, key: jax.Array) -> ModelDef:
    """The model with the parameter dtype of the precision policy; its initial values follow from `key`."""
    dtype = config.trainer.mp.param_dtype

    def build() -> nnx.Module:
        model = config.model.build(vocab_size, rngs=nnx.Rngs(key))
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param):
                variable.set_value(variable.get_value().astype(dtype))
        return model

    return ModelDef.trace(build)


def loss_function(config: RunConfig) -> LossFn:
    """The training loss in the compute dtype of the configuration."""
    dtype = config.trainer.mp.compute_dtype
    block_size = config.model.cross_entropy_block_size

    def loss(model: nnx.Module, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return token_loss(model, batch, dtype=dtype, key=key, block_size=block_size)  # pyright: ignore[reportArgumentType]

    return loss


def describe_mesh(mesh: Mesh) -> str:
    """For people: `8 x cpu: data 8` or `1 x NVIDIA H200`."""
    kind = mesh.devices.flat[0].device_kind
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.devices.size} x {kind}" + (f": {sizes}" if sizes else "")


def promise(mesh: Mesh) -> str | None:
    """What a mesh with a model axis promises instead of equality with all other meshes; None where nothing is lost."""
    if mesh.shape["model"] == 1:
        return None
    others = ", ".join(BATCH_AXES)
    return (
        f"tensor parallelism adds inside the model: bits are equal for model_axis_size={mesh.shape['model']} and any "
        f"sizes of {others}, and close, not equal, to those of other model axis sizes"
    )
