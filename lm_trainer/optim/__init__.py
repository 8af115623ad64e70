"""Optimizers: one file each, one line each in the union."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lm_trainer.optim.adam import AdamConfig
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.decay import decays_by_default
from lm_trainer.optim.muon import MuonConfig
from lm_trainer.optim.params import Param, Params
from lm_trainer.optim.scion import ScionConfig

AnyOptimizer = Annotated[
    AdamConfig | MuonConfig | ScionConfig,
    Field(discriminator="type"),
]
"""Whatever may stand under `optimizer:`; told apart by `type`."""

__all__ = [
    "AdamConfig",
    "AnyOptimizer",
    "MuonConfig",
    "OptimizerConfig",
    "Param",
    "Params",
    "ScionConfig",
    "decays_by_default",
]
