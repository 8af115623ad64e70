"""The model and the loss of a run, traced without allocating memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from pydantic import TypeAdapter

from lm_trainer.core.batch import Batch
from lm_trainer.models import AnyModel, DecoderConfig
from lm_trainer.models.peft import module_names
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.logit_clip import attach_logit_params
from lm_trainer.nn.lora import attach_lora, is_adapter_param
from lm_trainer.nn.loss import CROSS_ENTROPY, LossTerms, token_loss, token_nll
from lm_trainer.nn.measured import MeasuredParam
from lm_trainer.nn.nf4 import CodeParam, quantize_linears
from lm_trainer.nn.quantize import quantize
from lm_trainer.nn.reference import attach_reference, is_reference_param
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stages import StagedLoss, staged_token_loss, staged_token_nll
from lm_trainer.objectives.base import PreferenceLossConfig
from lm_trainer.objectives.distillation import DistillationConfig
from lm_trainer.objectives.distillation_loss import DistillationLoss
from lm_trainer.objectives.preference import PreferenceLoss
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.build.transfer import find_transfer
from lm_trainer.run.config.loss_checks import holds_separate_reference
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.state.model_def import ModelDef

INIT_KEY, DROPOUT_KEY, ADAPTER_KEY = 0, 1, 2
"""Numbers that are folded into the key of the seed, so that different uses draw different random numbers."""

Selection = bool | Mapping[str, bool] | Callable[[str], bool]
"""A selection of parameters by dotted name. Names that are missing in a mapping are not selected."""


def trace_model(config: RunConfig, vocab_size: int) -> ModelDef:
    """Traces the model of a configuration. The seed determines its initial values.

    If the loss compares the model with a separate reference or a teacher in every step, the model contains it, with
    frozen parameters.
    """
    key = jax.random.fold_in(jax.random.key(config.trainer.seed), INIT_KEY)
    transfer = find_transfer(config, vocab_size)
    quantization, adapter = config.trainer.quantization, config.adapter
    names = {} if adapter is None else module_names(config.model, vocab_size)
    teacher = None if config.loss.precomputes else teacher_config(config)

    def build() -> nnx.Module:
        model = config.model.build(vocab_size, rngs=nnx.Rngs(key))
        transfer.scale_initial_values(model)
        if (limit := config.optimizer.logit_limit) is not None:
            attach_logit_params(model, limit)
        if adapter is not None:
            attach_lora(model, adapter, names, rngs=nnx.Rngs(jax.random.fold_in(key, ADAPTER_KEY)))
            if adapter.base_quantization is not None:
                quantize_linears(model)
        if holds_separate_reference(config.loss, adapter):
            attach_reference(model, config.model.build(vocab_size, rngs=nnx.Rngs(key)))
        if quantization is not None:
            quantize(model, quantization)
        if teacher is not None:
            attach_reference(model, teacher.build(vocab_size, rngs=nnx.Rngs(key)))
        return model

    frozen = config.model.frozen_params
    trained: Selection = (lambda name: name not in frozen) if frozen else True
    if teacher is not None or holds_separate_reference(config.loss, adapter):
        trained = lambda name: not is_reference_param(name) and name not in frozen  # noqa: E731
    if adapter is not None:
        return trace_module(build, config.trainer.mp.param_dtype, is_adapter_param)
    model = trace_module(build, config.trainer.mp.param_dtype, trained)
    model = dataclasses.replace(model, multipliers=transfer.multipliers)
    return dataclasses.replace(model, constants=frozen & model.shapes.keys()) if frozen else model


def trace_frozen_model(config: RunConfig, vocab_size: int) -> ModelDef:
    """Traces the reference or the teacher of a loss as a model of its own, without adapters."""
    key = jax.random.fold_in(jax.random.key(config.trainer.seed), INIT_KEY)
    teacher, quantization, adapter = teacher_config(config), config.trainer.quantization, config.adapter

    def build() -> nnx.Module:
        if teacher is not None:
            return teacher.build(vocab_size, rngs=nnx.Rngs(key))
        model = config.model.build(vocab_size, rngs=nnx.Rngs(key))
        if adapter is not None and adapter.base_quantization is not None:
            quantize_linears(model)
        if quantization is not None:
            quantize(model, quantization)
        return model

    return trace_module(build, config.trainer.mp.param_dtype)


def teacher_config(config: RunConfig) -> DecoderConfig | None:
    """Returns the model section of the teacher; None if the loss has no teacher, or it has not been looked up."""
    loss = config.loss
    if not isinstance(loss, DistillationConfig) or loss.teacher_model is None:
        return None
    section: DecoderConfig = TypeAdapter(AnyModel).validate_python(loss.teacher_model)
    return section


def teacher_flops(config: RunConfig, vocab_size: int) -> int:
    """Returns the number of FLOPs per token of the forward pass of the teacher in a step; 0 without a teacher."""
    teacher = None if config.loss.precomputes else teacher_config(config)
    return 0 if teacher is None else flops_per_token(teacher.spec(vocab_size), config.model.seq_len).forward


def trace_module(build: Callable[[], nnx.Module], param_dtype: Any, is_trainable: Selection = True) -> ModelDef:
    """Traces a model, and casts its parameters to `param_dtype`; see `ModelDef.trace`."""

    # The cast is inside the traced function, so that under `jit` arrays of the wider dtype are never allocated.
    def cast() -> nnx.Module:
        model = build()
        for _, variable in nnx.iter_graph(model):
            # No narrow dtype holds measurements; quantized weights have dtypes of their own.
            if isinstance(variable, nnx.Param) and not isinstance(variable, MeasuredParam | CodeParam):
                variable.set_value(variable.get_value().astype(param_dtype))
        return model

    recorded = _ModuleRecorder(cast)
    if isinstance(is_trainable, bool):
        return ModelDef.trace(recorded, lambda _: is_trainable)
    if isinstance(is_trainable, Mapping):
        return ModelDef.trace(recorded, lambda name: is_trainable.get(name, False))
    return ModelDef.trace(recorded, is_trainable)


class _ModuleRecorder:
    """Function that builds a module from operations that are recorded once and replayed at each call.

    A run builds its model several times under `jit`, and tracing the Python code of the model takes longer than
    compiling it.
    """

    def __init__(self, build: Callable[[], nnx.Module]) -> None:
        self._build = build

    def __call__(self) -> nnx.Module:
        graphdef, operations, tree = self._recording
        return nnx.merge(graphdef, jax.tree.unflatten(tree, jaxpr_as_fun(operations)()))

    @functools.cached_property
    def _recording(self) -> tuple[nnx.GraphDef, ClosedJaxpr, Any]:
        """The structure of the module, the operations that produce its arrays, and the tree structure of the arrays."""
        graphdefs = []

        def arrays() -> nnx.State:
            graphdef, state = nnx.split(self._build())
            graphdefs.append(graphdef)
            return state

        operations, shapes = jax.make_jaxpr(arrays, return_shape=True)()
        return graphdefs[0], operations, jax.tree.structure(shapes)


def loss_function(config: RunConfig) -> NextTokenLoss | PreferenceLoss | DistillationLoss:
    """Returns the training loss in the compute dtype of the configuration."""
    if isinstance(config.loss, DistillationConfig):
        return DistillationLoss(config.loss, config.trainer.mp.compute_dtype, config.model.cross_entropy_block_size)
    if isinstance(config.loss, PreferenceLossConfig):
        return PreferenceLoss(config.loss, config.trainer.mp.compute_dtype, config.model.cross_entropy_block_size)
    terms = LossTerms(z_loss_weight=config.z_loss_weight)
    return next_token_loss(config.trainer.mp.compute_dtype, config.model.cross_entropy_block_size, terms)


def evaluation_loss(config: RunConfig) -> NextTokenLoss | PreferenceLoss | DistillationLoss:
    """Returns the loss for held-out sets, without the z-loss of training."""
    if isinstance(config.loss, DistillationConfig):
        return dataclasses.replace(loss_function(config), evaluates=True)
    if isinstance(config.loss, PreferenceLossConfig):
        return loss_function(config)
    terms = LossTerms(entropy=config.log_entropy)
    return next_token_loss(config.trainer.mp.compute_dtype, config.model.cross_entropy_block_size, terms)


def next_token_loss(dtype: Any, block_size: int | None = None, terms: LossTerms = CROSS_ENTROPY) -> NextTokenLoss:
    """Returns the next-token cross-entropy for a `Decoder`. The arguments are the fields of `NextTokenLoss`."""
    return NextTokenLoss(dtype, block_size, terms)


@runtime_checkable
class SplittableLoss(Protocol):
    """A loss for a `Decoder` that can be computed in stages."""

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages, for decoders like `model`, which may be abstract."""
        ...


@dataclass(frozen=True)
class NextTokenLoss:
    """Next-token cross-entropy for a `Decoder`, usable as a `LossFn`."""

    dtype: Any
    """Compute dtype."""
    block_size: int | None = None
    """See `token_loss`."""
    terms: LossTerms = CROSS_ENTROPY
    """See `token_loss`."""

    def __call__(
        self, model: nnx.Module, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        return token_loss(
            model,  # pyright: ignore[reportArgumentType]
            batch,
            dtype=self.dtype,
            key=key,
            block_size=self.block_size,
            terms=self.terms,
        )

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages, for decoders like `model`, which may be abstract."""
        return staged_token_loss(model.spec, dtype=self.dtype, block_size=self.block_size, terms=self.terms)


@dataclass(frozen=True)
class TokenNll:
    """Loss of each token for a `Decoder`, as a `LossFn` with the metric `nll` that `token_nll` returns."""

    dtype: Any
    """Compute dtype."""
    block_size: int | None = None
    """See `token_loss`."""
    top: int = 0
    """See `token_nll`."""

    def __call__(
        self, model: nnx.Module, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        del key
        return token_nll(
            model,  # pyright: ignore[reportArgumentType]
            batch,
            dtype=self.dtype,
            block_size=self.block_size,
            top=self.top,
        )

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages, for decoders like `model`, which may be abstract."""
        return staged_token_nll(model.spec, dtype=self.dtype, block_size=self.block_size, top=self.top)


def recomputes_layers(trainer: TrainerConfig, spec: DecoderSpec) -> bool:
    """Returns True if a step recomputes every layer in full, regardless of the model's rematerialisation settings."""
    return trainer.gathers_layers and not (spec.saves_inside_layers and can_save_inside_layers(trainer))


def can_save_inside_layers(trainer: TrainerConfig) -> bool:
    """Returns True if a step that gathers one layer at a time can save activations inside layers.

    This is possible if devices do not share microbatches.
    """
    return max(trainer.model_axis_size, trainer.context_axis_size, trainer.expert_axis_size) == 1
