"""Settings of a fit and of its bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.solver import Objective

METHODS = ("vp", "huber")
UNITS = ("residuals", "points", "runs")
DELTA = 1e-3
"""Threshold of the Huber loss, in log L (Hoffmann et al. 2022, section 3.3)."""
NUM_CONSTANTS = 5


@dataclass(frozen=True)
class FitSettings:
    """Method of the fit, and the number of draws and the level of its intervals."""

    method: str = "vp"
    """`vp`: variable projection with non-negative least squares; `huber`: Huber loss, as in the papers."""
    start: str = "hoffmann"
    """Start of the `huber` search: `hoffmann` or `olmo`."""
    resample: str = "residuals"
    """Unit of the bootstrap: `residuals`, `points` or `runs`."""
    draws: int = 500
    """Number of resamples of the bootstrap."""
    seed: int = 0
    """Seed of the bootstrap."""
    level: float = 0.9
    """Confidence level of all intervals."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: there are {', '.join(METHODS)}")
        if self.resample not in UNITS:
            raise UserError(f"--resample {self.resample}: there are {', '.join(UNITS)}")
        check_level(self.level)
        if self.draws < 50:
            raise UserError(f"--draws {self.draws}: quantiles need at least 50")

    @property
    def objective(self) -> Objective:
        """The objective of the fit."""
        return Objective(DELTA if self.method == "huber" else None)


def check_level(level: float) -> None:
    """Checks the confidence level of an interval.

    Raises:
        UserError: if it is below 0.5, or not below 1.
    """
    if not 0.5 <= level < 1:
        raise UserError(f"--level {level:g}: it has to be at least 0.5 and below 1, such as 0.9")
