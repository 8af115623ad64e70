"""Configuration of how to handle updates and steps that are far above previous ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, PositiveFloat

from lm_trainer.core.config import Config


class ClipUpdateNormConfig(Config):
    """Clips the update based on the norms of previous updates.

    The update (including weight decay, without the learning rate) is scaled down to a global norm of at most mean +
    `sigma_factor` * standard deviation of the norms of the last `rolling_interval_length` updates before clipping.
    While the history has fewer than half of these steps, updates are not clipped.
    """

    rolling_interval_length: int = Field(default=128, ge=2)
    """Number of steps in the history."""
    sigma_factor: PositiveFloat = 3.0
    """Maximum norm of an update, in standard deviations above the mean."""


class SkipStepConfig(Config):
    """Skips steps with an unusual loss or gradient norm.

    A step is skipped if its loss or gradient norm is not finite, or exceeds mean + `sigma_factor` * standard deviation
    over the last `rolling_interval_length` steps. While the history has fewer than half of these steps, every finite
    step is taken. A skipped step changes neither parameters nor moments. Its finite values enter the history, so that a
    lasting change is eventually accepted.
    """

    absent: ClassVar[Mapping[str, str]] = {
        "from_bool_int_or_config": "use SkipStepConfig.parse(value), not for False",
        "wrap": "use skip_bad_steps(optimizer, config) of lm_trainer.optim.skip",
    }

    rolling_interval_length: int = Field(default=128, ge=2)
    """Number of steps in the history."""
    sigma_factor: PositiveFloat = 6.0
    """Maximum of the loss and of the gradient norm of a step, in standard deviations above their means."""

    @classmethod
    def parse(cls, value: bool | int | SkipStepConfig) -> SkipStepConfig:
        """Converts short forms: `True` means the default settings, and a number the length of the history."""
        if isinstance(value, SkipStepConfig):
            return value
        return cls() if value is True else cls(rolling_interval_length=int(value))
