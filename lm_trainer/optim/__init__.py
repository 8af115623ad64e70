"""Optimizers: one file for each, and the union of their configurations."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from lm_trainer.optim.adafactor import AdafactorConfig
from lm_trainer.optim.adam import AdamConfig
from lm_trainer.optim.adam_mini import AdamMiniConfig
from lm_trainer.optim.adamh import AdamHConfig
from lm_trainer.optim.adan import AdanConfig
from lm_trainer.optim.adopt import AdoptConfig
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.cautious import CautiousConfig
from lm_trainer.optim.decay import decays_by_default
from lm_trainer.optim.dion import DionConfig
from lm_trainer.optim.from_optax import OptaxOptimizer, from_optax
from lm_trainer.optim.kron import KronConfig
from lm_trainer.optim.lion import LionConfig
from lm_trainer.optim.mars import MarsConfig
from lm_trainer.optim.muon import MuonConfig
from lm_trainer.optim.muonh import MuonHConfig
from lm_trainer.optim.normuon import NorMuonConfig
from lm_trainer.optim.optimizer import Optimizer
from lm_trainer.optim.params import Multipliers, Param, Params
from lm_trainer.optim.rmsprop import RmsPropConfig
from lm_trainer.optim.schedule_free import ScheduleFreeConfig
from lm_trainer.optim.scion import ScionConfig
from lm_trainer.optim.soap import SoapConfig
from lm_trainer.optim.sophia import SophiaGConfig, SophiaHConfig

AnyOptimizer = Annotated[
    AdamConfig
    | AdafactorConfig
    | AdamHConfig
    | AdamMiniConfig
    | AdanConfig
    | AdoptConfig
    | CautiousConfig
    | DionConfig
    | KronConfig
    | LionConfig
    | MarsConfig
    | MuonConfig
    | MuonHConfig
    | NorMuonConfig
    | RmsPropConfig
    | ScheduleFreeConfig
    | ScionConfig
    | SoapConfig
    | SophiaGConfig
    | SophiaHConfig,
    Field(discriminator="type"),
]
"""Configurations that `optimizer:` accepts, distinguished by `type`."""

OPTIMIZERS: tuple[type[OptimizerConfig], ...] = get_args(get_args(AnyOptimizer)[0])
"""The members of `AnyOptimizer`."""

__all__ = [
    "OPTIMIZERS",
    "AdafactorConfig",
    "AdamConfig",
    "AdamHConfig",
    "AdamMiniConfig",
    "AdanConfig",
    "AdoptConfig",
    "AnyOptimizer",
    "CautiousConfig",
    "DionConfig",
    "KronConfig",
    "LionConfig",
    "MarsConfig",
    "Multipliers",
    "MuonConfig",
    "MuonHConfig",
    "NorMuonConfig",
    "OptaxOptimizer",
    "Optimizer",
    "OptimizerConfig",
    "Param",
    "Params",
    "RmsPropConfig",
    "ScheduleFreeConfig",
    "ScionConfig",
    "SoapConfig",
    "SophiaGConfig",
    "SophiaHConfig",
    "decays_by_default",
    "from_optax",
]
