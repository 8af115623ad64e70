"""How a law is fitted, and how its intervals come about."""

from __future__ import annotations

from dataclasses import dataclass

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.solver import Objective

METHODS = ("vp", "huber")
UNITS = ("residuals", "points", "runs")
DELTA = 1e-3
"""Of Huber's function, in log L (Hoffmann et al. 2022)."""
NUM_CONSTANTS = 5


@dataclass(frozen=True)
class Settings:
    """How a law is fitted."""

    method: str = "vp"
    """`vp`: variable projection with non-negative least squares; `huber`: as the papers do."""
    start: str = "hoffmann"
    """Where `huber` starts: `hoffmann` or `olmo`."""
    resample: str = "residuals"
    """What the bootstrap draws: `residuals`, `points` or `runs`."""
    draws: int = 500
    """Of the bootstrap."""
    seed: int = 0
    """Of the bootstrap."""
    level: float = 0.9
    """Of all intervals."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: there are {', '.join(METHODS)}")
        if self.resample not in UNITS:
            raise UserError(f"--resample {self.resample}: there are {', '.join(UNITS)}")
        if not 0.5 <= self.level < 1:
            raise UserError(f"--level {self.level:g}: it has to be at least 0.5 and below 1, such as 0.9")
        if self.draws < 50:
            raise UserError(f"--draws {self.draws}: quantiles need at least 50")

    @property
    def objective(self) -> Objective:
        """What is made small."""
        return Objective(DELTA if self.method == "huber" else None)
