"""Training losses. To add a loss, write one file and add one line to the union."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lm_trainer.objectives.base import LossConfig, PairSums, PreferenceLossConfig
from lm_trainer.objectives.distillation import DistillationConfig
from lm_trainer.objectives.dpo import DpoConfig
from lm_trainer.objectives.ipo import IpoConfig
from lm_trainer.objectives.kto import KtoConfig
from lm_trainer.objectives.next_token import NextTokenConfig
from lm_trainer.objectives.orpo import OrpoConfig
from lm_trainer.objectives.simpo import SimpoConfig

AnyLoss = Annotated[
    NextTokenConfig | DpoConfig | IpoConfig | SimpoConfig | OrpoConfig | KtoConfig | DistillationConfig,
    Field(discriminator="type"),
]
"""Configurations that `loss:` accepts, distinguished by `type`."""

__all__ = [
    "AnyLoss",
    "DistillationConfig",
    "DpoConfig",
    "IpoConfig",
    "KtoConfig",
    "LossConfig",
    "NextTokenConfig",
    "OrpoConfig",
    "PairSums",
    "PreferenceLossConfig",
    "SimpoConfig",
]
