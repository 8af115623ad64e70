"""Fits the law to points, with intervals, and saves fits as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.fit.accuracy import DirectFit
from lm_trainer.ladder.fit.bootstrap import central_interval, fit_resamples
from lm_trainer.ladder.fit.chain import AccuracySigmoid
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.repeats import RepeatLaw
from lm_trainer.ladder.fit.search import search_law
from lm_trainer.ladder.fit.settings import FitSettings
from lm_trainer.ladder.fit.task import TaskFit, fit_task


@dataclass(frozen=True)
class Fit:
    """A fitted law and its bootstrap."""

    points: Points
    settings: FitSettings
    law: Law
    draws: Law
    """Laws fitted to the resamples. Each constant is an array of shape (draws,)."""
    task: TaskFit | None = None
    """The forms of a task's accuracy, if the points have one."""

    @property
    def errors(self) -> np.ndarray:
        """log(measured / fitted) of every point (P,)."""
        return np.log(self.points.loss / self.points.fitted_loss(self.law))

    @property
    def noise(self) -> float:
        """Standard deviation of log L of a single measurement, estimated from the residuals."""
        # Each fitted constant uses up a degree of freedom.
        return float(np.sqrt((self.errors**2).sum() / (len(self.points) - len(self.law.names))))

    @property
    def max_flops(self) -> float:
        """Compute (6 N D) of the largest rung."""
        return float(self.points.flops.max())

    def interval(self, constant: str) -> tuple[float, float]:
        """Returns the interval of one constant."""
        return central_interval(getattr(self.draws, constant), self.settings.level)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fit as plain data at full precision, for `from_dict`."""
        return {
            "format": "lm_trainer ladder fit 1",
            "law": self.law.as_dict(),
            "intervals": {name: self.interval(name) for name in self.law.names},
            "noise": self.noise,
            "settings": asdict(self.settings),
            "points": self.points.as_dict(),
            "draws": self.draws.as_dict(),
            "chain": self.task and self.task.chain.as_dict(),
            "chain_draws": self.task and self.task.chain_draws.as_dict(),
            **({} if self.task is None else {"task": self.task.as_dict()}),
        }

    def digest(self) -> str:
        """Computes the SHA-256 of the complete fit, including the draws."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


def fit(points: Points, settings: FitSettings | None = None) -> Fit:
    """Fits the law.

    Raises:
        UserError: if the points do not determine a law.
    """
    settings = settings or FitSettings()
    law = search_law(points, settings)
    drawn = fit_resamples(points, law, settings)
    return Fit(points, settings, law, drawn, None if points.task is None else fit_task(points, settings))


def save(fitted: Fit, path: AnyPath) -> None:
    """Writes a fit as JSON."""
    path = local_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fitted.as_dict(), indent=1) + "\n")


def is_fit(plain: Any) -> bool:
    """Returns True if parsed JSON contains a fit."""
    return isinstance(plain, dict) and str(plain.get("format", "")).startswith("lm_trainer ladder fit")


def from_dict(plain: Mapping[str, Any], source: str) -> Fit:
    """Reads the result of `Fit.as_dict`.

    Raises:
        UserError: for damaged data.
    """

    def arrays(kind: Any, values: Mapping[str, Any] | None) -> Any:
        return values and kind(**{key: np.asarray(value) for key, value in values.items()})

    try:
        kind = RepeatLaw if "repeats" in plain["law"] else Law
        return Fit(
            Points.from_dict(plain["points"]),
            FitSettings(**plain["settings"]),
            kind(**plain["law"]),
            arrays(kind, plain["draws"]),
            None if plain["chain"] is None else _read_task(plain),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{source}: not a fit, or of another version: {error}; write it again with lmt ladder fit"
        ) from None


def _read_task(plain: Mapping[str, Any]) -> TaskFit:
    task = dict(plain["task"])
    direct = tuple(DirectFit.from_dict(item) for item in task.pop("direct"))
    draws = {name: np.asarray(values) for name, values in plain["chain_draws"].items()}
    return TaskFit(chain=AccuracySigmoid(**plain["chain"]), chain_draws=AccuracySigmoid(**draws), direct=direct, **task)
