"""Keys of what an optimizer does about updates and steps that are far above those before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, PositiveFloat

from lm_trainer.core.config import Config


class ClipUpdateNormConfig(Config):
    """The update (weight decay included, the learning rate not) is scaled down to the global norm mean +
    `sigma_factor` * standard deviation of the last `rolling_interval_length` updates, as they were before clipping.

    With fewer than half of these steps in the history nothing is clipped.
    """

    rolling_interval_length: int = Field(default=128, ge=2)
    """Number of steps in the history."""
    sigma_factor: PositiveFloat = 3.0
    """Number of standard deviations above the mean that the norm of an update may be."""


class SkipStepConfig(Config):
    """A step is skipped when its loss or gradient norm exceeds mean + `sigma_factor` * standard deviation of those of
    the last `rolling_interval_length` steps, or is not finite.

    With fewer than half of these steps in the history, every finite step is taken. A skipped step changes neither
    parameters nor moments; what was finite in it enters the history, so that a lasting change is accepted in time.
    """

    absent: ClassVar[Mapping[str, str]] = {
        "from_bool_int_or_config": "use SkipStepConfig.parse(value), not for False",
        "wrap": "use skip_bad_steps(optimizer, config) of lm_trainer.optim.skip",
    }

    rolling_interval_length: int = Field(default=128, ge=2)
    """Number of steps in the history."""
    sigma_factor: PositiveFloat = 6.0
    """Number of standard deviations above the mean that a step may be."""

    @classmethod
    def parse(cls, value: bool | int | SkipStepConfig) -> SkipStepConfig:
        """`True` stands for the defaults, a number for the length of the history."""
        if isinstance(value, SkipStepConfig):
            return value
        return cls() if value is True else cls(rolling_interval_length=int(value))
