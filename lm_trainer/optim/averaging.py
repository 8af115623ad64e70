"""Averages of the weights over training, which often evaluate better than the last weights."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lm_trainer.core.config import Config


class AveragingConfig(Config):
    """An average that moves towards the weights after every step: a += share * (w - a), from the initial weights."""

    beta: float = Field(default=0.999, ge=0, lt=1)
    """How much of the average stays at each step; about 1 / (1 - beta) steps count."""

    def share(self, step: int) -> float:
        """How far the average moves towards the weights after `step` steps, counted from 1."""
        del step
        return 1 - self.beta


class EmaConfig(AveragingConfig):
    """The classic exponential moving average."""

    type: Literal["ema"] = "ema"


class EmaDecaySqrtConfig(AveragingConfig):
    """An exponential moving average that comes to rest: from `switch_step` on, with x the part of `decay_steps` that
    has passed, weights enter with 1 - sqrt(x) times their share, so that the average changes no more at the end.
    """

    type: Literal["ema_decay_sqrt"] = "ema_decay_sqrt"
    switch_step: NonNegativeInt = 100_000
    """The step until which it is a plain moving average."""
    decay_steps: PositiveInt = 100_000
    """How many steps it takes to come to rest."""

    def share(self, step: int) -> float:
        """As the class says."""
        x = min(1.0, max(0, step - self.switch_step) / self.decay_steps)
        return (1 - self.beta) * (1 - math.sqrt(x))


AnyAveraging = Annotated[EmaConfig | EmaDecaySqrtConfig, Field(discriminator="type")]
