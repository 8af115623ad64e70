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
from lm_trainer.ladder.fit.bootstrap import central_interval, fit_resamples
from lm_trainer.ladder.fit.chain import AccuracySigmoid, fit_accuracy_sigmoid
from lm_trainer.ladder.fit.huber import fit_huber
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.repeats import RepeatLaw, make_design
from lm_trainer.ladder.fit.settings import NUM_CONSTANTS, FitSettings
from lm_trainer.ladder.fit.solver import fit_by_variable_projection

_FEWEST_SIZES = 3
"""Minimum number of different values of N, and of D: each has a factor and an exponent, and there is a constant."""
_FEWEST_REPEATED = 2
"""Minimum number of different repetitions for R*."""
_CHAIN_DRAWS = 200
"""Maximum number of resamples for the sigmoid, because each needs a separate fit."""


@dataclass(frozen=True)
class Fit:
    """A fitted law and its bootstrap."""

    points: Points
    settings: FitSettings
    law: Law
    draws: Law
    """Laws fitted to the resamples. Each constant is an array of shape (draws,)."""
    chain: AccuracySigmoid | None = None
    """The sigmoid from the loss to an accuracy."""
    chain_draws: AccuracySigmoid | None = None

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
            "chain": self.chain and self.chain.as_dict(),
            "chain_draws": self.chain_draws and self.chain_draws.as_dict(),
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
    _check_points(points)
    if settings.method == "huber":
        law = fit_huber(points, settings.start)
    else:
        design = make_design(points)
        law = design.to_law(fit_by_variable_projection(design, points.loss))
    # Plain floats, as in JSON, so that a fit has the same digest after it is saved and read.
    law = type(law)(*(float(getattr(law, name)) for name in law.names))
    drawn = fit_resamples(points, law, settings)
    if points.task is None:
        return Fit(points, settings, law, drawn)
    chain, chains = fit_accuracy_sigmoid(
        points.loss, points.task, draws=min(settings.draws, _CHAIN_DRAWS), seed=settings.seed
    )
    return Fit(points, settings, law, drawn, chain, chains)


def _check_points(points: Points) -> None:
    source, sizes, lengths = points.source or "the points", len(points.sizes), len(np.unique(points.tokens))
    label = f"{source}: {len(points)} points of {sizes} sizes"
    constants = NUM_CONSTANTS + (points.unique_tokens is not None)
    if len(points) <= constants:
        raise UserError(f"{label} do not determine {constants} constants; it takes {constants + 1} points, better 12")
    if sizes < _FEWEST_SIZES:
        raise UserError(
            f"{label}: E, A and alpha cannot be told apart with fewer than {_FEWEST_SIZES}; train another size"
        )
    if lengths < _FEWEST_SIZES:
        raise UserError(f"{label} and {lengths} lengths: E, B and beta cannot be told apart; raise chinchilla_multiple")
    # If D / N is the same for all points, the effects of N and D cannot be separated.
    spread = np.log(points.tokens / points.num_params)
    if np.ptp(spread) < 0.05:
        raise UserError(
            f"{label} all have about {np.exp(spread.mean()):.3g} tokens per parameter, so that the effects of size and "
            "length cannot be told apart; raise chinchilla_multiple"
        )
    if points.unique_tokens is not None:
        _check_repeats(points.tokens / points.unique_tokens, label)


def _check_repeats(passes: np.ndarray, label: str) -> None:
    if len(np.unique(passes[passes > 1])) < _FEWEST_REPEATED:
        raise UserError(
            f"{label} have at most {passes.max():.3g} passes over their text, too few to show what repeated text is "
            f"worth; train {_FEWEST_REPEATED} points past one pass, better past 4, or fit without unique tokens"
        )


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
        chain = plain["chain"] and AccuracySigmoid(**plain["chain"])
        return Fit(
            Points.from_dict(plain["points"]),
            FitSettings(**plain["settings"]),
            kind(**plain["law"]),
            arrays(kind, plain["draws"]),
            chain,
            arrays(AccuracySigmoid, plain["chain_draws"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{source}: not a fit, or of another version: {error}; write it again with lmt ladder fit"
        ) from None
