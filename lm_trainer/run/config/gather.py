"""The choice of what a step gathers at a time, where the configuration leaves it to the size of the model."""

from __future__ import annotations

from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig

LARGE = 100_000_000
"""Parameters from which on a model is computed layer by layer. Runs are begun with it: another number would give other
bits to those whose models lie between."""


def with_gather(config: RunConfig, vocab_size: int) -> RunConfig:
    """A configuration in which `trainer.gather` is chosen; `vocab_size` are the rows of the token embedding."""
    spec = config.model.spec(vocab_size)
    trainer = choose_gather(config.trainer, parameter_count(spec), layers=spec.encoder is None)
    return config if trainer is config.trainer else config.model_copy(update={"trainer": trainer})


def choose_gather(trainer: TrainerConfig, num_params: int, *, layers: bool) -> TrainerConfig:
    """A trainer section in which `gather` is chosen; it follows from the configuration, whatever the devices are.

    Args:
        trainer: the section.
        num_params: of the model.
        layers: the loss can be computed one layer at a time.
    """
    if not trainer.gathers_by_size:
        return trainer
    # A pipeline takes microbatches through the whole model.
    by_layer = layers and trainer.pipeline_axis_size == 1 and num_params >= LARGE
    return trainer.model_copy(update={"gather": "layer" if by_layer else "model"})
