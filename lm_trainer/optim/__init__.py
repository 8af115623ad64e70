"""Optimizers: one file each, one line each in the union."""

from __future__ import annotations

from lm_trainer.optim.adam import AdamConfig
from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.decay import decays_by_default
from lm_trainer.optim.params import Param, Params

AnyOptimizer = AdamConfig

__all__ = ["AdamConfig", "AnyOptimizer", "OptimizerConfig", "Param", "Params", "decays_by_default"]
