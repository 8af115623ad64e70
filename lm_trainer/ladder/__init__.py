"""Ladders of models: plan, run and measure several model sizes with one recipe, and predict larger models."""

from lm_trainer.ladder.checkpoints import RunCheckpointInfo
from lm_trainer.ladder.config import InstanceSource
from lm_trainer.ladder.ladder import ModelLadder
from lm_trainer.ladder.models import (
    DeviceMeshSpec,
    ModelConfigurator,
    Olmo3ModelConfigurator,
    TransformerModelConfigurator,
)
from lm_trainer.ladder.recipe import Period, RunConfigurator, WSDSChinchillaRunConfigurator
from lm_trainer.ladder.sizes import TransformerSize

__all__ = [
    "DeviceMeshSpec",
    "InstanceSource",
    "ModelConfigurator",
    "ModelLadder",
    "Olmo3ModelConfigurator",
    "Period",
    "RunCheckpointInfo",
    "RunConfigurator",
    "TransformerModelConfigurator",
    "TransformerSize",
    "WSDSChinchillaRunConfigurator",
]
