"""Checks that a loss other than the default fits the other sections of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_trainer.core.data_content import DataContent
from lm_trainer.nn.lora_config import AnyAdapter
from lm_trainer.objectives.distillation import DistillationConfig
from lm_trainer.objectives.next_token import NextTokenConfig
from lm_trainer.step.dispatch.model_parallel_limits import model_parallel_axes

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig

_FORMATS: dict[DataContent, str] = {
    "documents": "a format of text",
    "pairs": "data.format: {type: preference}",
    "examples": "data.format: {type: unpaired_preference}",
}
_LOSSES: dict[DataContent, str] = {
    "documents": "loss: {type: next_token}",
    "pairs": "loss: {type: dpo}, or ipo, simpo or orpo",
    "examples": "loss: {type: kto}",
}


def check_loss(config: RunConfig) -> None:
    """Checks that loss, data, start and trainer fit together.

    Raises:
        ValueError: if they do not; names the keys and what to write.
    """
    _check_contents(config)
    if isinstance(config.loss, NextTokenConfig):
        return
    name = f"loss: {config.loss.type}"
    if not config.use_hf_model_config and config.model.features_shape is not None:
        raise ValueError(f"{name} is computed on text alone, but model {config.model.type} hears; use another model")
    if not config.use_hf_model_config and getattr(config.model, "mtp_depth", 0):
        raise ValueError(f"model.mtp_depth: {name} does not train the modules that predict later tokens; set it to 0")
    if config.z_loss_weight or config.log_entropy:
        key = "z_loss_weight" if config.z_loss_weight else "log_entropy"
        raise ValueError(f"{key} has no effect with {name}; remove it")
    if config.optimizer.curvature is not None:
        raise ValueError(
            f"optimizer.type: {config.optimizer.type} estimates the curvature of a cross-entropy, not of {name}; use "
            f"another optimizer"
        )
    _check_trainer(config, name)
    if isinstance(config.loss, DistillationConfig) and config.adapter is not None:
        raise ValueError(f"adapter: {name} trains all parameters of a model; remove the adapter")
    if config.loss.has_reference:
        _check_start(config, name)


def has_separate_reference(loss: Any, adapter: AnyAdapter | None) -> bool:
    """Returns True if the reference of a loss is a second model, and not the base of an adapter."""
    return loss.has_reference and (adapter is None or loss.reference is not None)


def holds_separate_reference(loss: Any, adapter: AnyAdapter | None) -> bool:
    """Returns True if the weights of such a reference are needed during training."""
    return has_separate_reference(loss, adapter) and not loss.precomputes


def _check_contents(config: RunConfig) -> None:
    expected = config.loss.content
    for name, settings in config.data.sets.items():
        actual = settings.format.content
        if actual == expected or settings.gives_rows:
            continue
        key = f"data.configs.{name}.format" if config.data.configs else "data.format"
        raise ValueError(
            f"loss: {config.loss.type} is computed on {expected}, but {key}: {settings.format.type} makes {actual}; "
            f"write {_LOSSES[actual]}, or {_FORMATS[expected]}"
        )


def _check_trainer(config: RunConfig, name: str) -> None:
    trainer = config.trainer
    if trainer.gather == "layer" and not config.loss.has_stages:
        raise ValueError(
            f"trainer.gather: layer: {name} also runs the trained model on answers to other prompts, before its loss "
            f"is known, so its gradient does not take one pass through the layers; use model"
        )
    if axes := model_parallel_axes(trainer.step_plan.mesh_shape._asdict()):
        raise ValueError(
            f"trainer.{axes[0]}_axis_size: {name} is computed on whole rows and models; set it to 1, and shard the "
            f"weights over the data axis or, by model_axis_size, within layers"
        )


def _check_start(config: RunConfig, name: str) -> None:
    if not (config.trainer.initialize_from or config.initialize_from_hf):
        raise ValueError(
            f"{name} compares the model with the model at the start, but training starts from random weights; name a "
            f"run or checkpoint as trainer.initialize_from, or a Hugging Face checkpoint as initialize_from_hf"
        )
    if config.adapter is not None and config.loss.reference is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"loss.reference: with an adapter, the reference of {name} is its frozen base; remove the key")
