"""Averages of the weights over training, which often evaluate better than the final weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lm_trainer.core.config import Config

if TYPE_CHECKING:
    import jax


class AveragingConfig(Config):
    """An average a of the weights w that starts from the initial weights. After every step, a += rate * (w - a)."""

    beta: float = Field(default=0.999, ge=0, lt=1)
    """Fraction of the average that is kept at each step; it averages over about 1 / (1 - beta) steps."""

    def rate(self, step: int) -> float:
        """Returns the fraction of the distance to the weights that the average moves after step `step`, from 1."""
        del step
        return 1 - self.beta


class EmaConfig(AveragingConfig):
    """The classic exponential moving average."""

    type: Literal["ema"] = "ema"


class EmaDecaySqrtConfig(AveragingConfig):
    """An exponential moving average that stops moving at the end of a run.

    From `switch_step` on, the rate is multiplied by 1 - sqrt(x), where x is the elapsed fraction of `decay_steps`. At
    the end the rate is therefore 0.

    Levanter's code differs: it divides the weight of each step, 1 - beta before the switch and 1 - sqrt(x) after it, by
    the sum of all weights so far. Until the switch this is a mean over all steps with equal weights, not a moving
    average.
    """

    type: Literal["ema_decay_sqrt"] = "ema_decay_sqrt"
    switch_step: NonNegativeInt = 100_000
    """Step until which it is an ordinary moving average."""
    decay_steps: PositiveInt = 100_000
    """Number of steps from `switch_step` until the average stops moving."""

    def rate(self, step: int) -> float:
        """Returns (1 - beta) * (1 - sqrt(x)), with x as described for the class."""
        x = min(1.0, max(0, step - self.switch_step) / self.decay_steps)
        return (1 - self.beta) * (1 - math.sqrt(x))


def ema_update(averaged: dict[str, jax.Array], params: dict[str, jax.Array], rate: jax.Array) -> dict[str, jax.Array]:
    """Returns a + rate * (w - a) for every parameter, in the dtype of the average; `rate` is a float32 scalar."""
    import jax

    return jax.tree.map(lambda a, p: a + rate.astype(a.dtype) * (p.astype(a.dtype) - a), averaged, params)


AnyAveraging = Annotated[EmaConfig | EmaDecaySqrtConfig, Field(discriminator="type")]
