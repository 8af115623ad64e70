"""Resolves `trainer.gather: auto`: chooses by model size whether to gather the full model or one layer at a time."""

from __future__ import annotations

from lm_trainer.objectives.next_token import NextTokenConfig
from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig

LARGE_MODEL_PARAMS = 100_000_000
"""Minimum number of parameters for which a model is computed layer by layer. Changing this value would change the bits
of existing runs whose model size is between the old and the new value."""


def with_resolved_gather(config: RunConfig, vocab_size: int) -> RunConfig:
    """Returns the configuration with `trainer.gather` resolved; `vocab_size` is the number of token embedding rows."""
    spec = config.model.spec(vocab_size)
    # Runs with an encoder or another loss were begun before these had stages, and keep their bits.
    by_layer = spec.encoder is None and isinstance(config.loss, NextTokenConfig)
    trainer = resolve_gather(config.trainer, parameter_count(spec), layers=by_layer)
    return config if trainer is config.trainer else config.model_copy(update={"trainer": trainer})


def resolve_gather(trainer: TrainerConfig, num_params: int, *, layers: bool) -> TrainerConfig:
    """Returns a trainer section with `gather` resolved.

    The choice depends on the configuration, but not on the devices.

    Args:
        trainer: the trainer section.
        num_params: number of parameters of the model.
        layers: True if the loss can be computed one layer at a time.
    """
    if not trainer.gathers_by_size:
        return trainer
    # A pipeline passes microbatches through the full model.
    by_layer = layers and trainer.pipeline_axis_size == 1 and num_params >= LARGE_MODEL_PARAMS
    return trainer.model_copy(update={"gather": "layer" if by_layer else "model"})
