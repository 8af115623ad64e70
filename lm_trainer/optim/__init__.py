"""Optimizers: one file each, one line each in the union."""

from __future__ import annotations

from lm_trainer.optim.adam import AdamConfig
from lm_trainer.optim.base import OptimizerConfig, decays_by_default

AnyOptimizer = AdamConfig

__all__ = ["AdamConfig", "AnyOptimizer", "OptimizerConfig", "decays_by_default"]
