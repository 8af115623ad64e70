"""Alert: one process of a run makes the others wait."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from lm_trainer.core.config import Config


class Straggler(Config):
    """One process needs longer for its own part of a step than the other processes, which wait for it."""

    share: float = Field(default=0.2, gt=0)
    """Alert if the process loses at least this fraction of the step time, compared with the median process."""
    least: NonNegativeFloat = 0.02
    """Lost time in seconds per step below which there are no alerts."""
    steps: PositiveInt = 20
    """Number of recent steps whose mean times are compared, without the longest tenth of them."""
