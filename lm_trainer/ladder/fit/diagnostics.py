"""Evidence against a fit: constants that are not determined, points that decide alone, and hold-outs.

Dimensions: R laws, one for each point that is left out, and P points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import leverage
from lm_trainer.ladder.fit.fitting import Fit, fit
from lm_trainer.ladder.fit.law import CONSTANTS
from lm_trainer.ladder.fit.predict import Range, predict
from lm_trainer.ladder.fit.solver import EXPONENTS, Design, refine

_AHEAD = 10.0
"""Compute over that of the largest rung, at which the effect of single points is measured."""
_STRANGE = 0.01
"""The chance of calling a point of a right law an outlier, over all points."""
_FLAT = 0.98
"""Correlation of two constants over the draws, from which on they are said to trade off."""
_DECISIVE = 0.5
"""Part of the half-width of the interval, from which on the shift by a single point is said."""


class Held(NamedTuple):
    """A point that was left out, and its prediction by the law of the others."""

    label: str
    measured: float
    predicted: Range

    @property
    def error(self) -> float:
        """Relative: above 0 where the prediction is too high."""
        return self.predicted.value / self.measured - 1


@dataclass(frozen=True)
class Influence:
    """Dependence of a fit on single points; arrays have shape (P,)."""

    shifts: np.ndarray
    """Relative change, without each point, of the loss at ten times the compute of the largest rung."""
    strange: np.ndarray
    """Error of each point in the law of the others, over the noise of the others."""


def backtest(found: Fit) -> list[Held]:
    """Fits without the largest size and predicts it; without the largest compute, where too few sizes would remain.

    An empty list where too few points would remain.
    """
    points = found.points
    for held in (points.num_params == points.sizes[-1], points.flops == points.flops.max()):
        try:
            rest = fit(points.where(~held), found.settings)
        except UserError:
            # Too few sizes or points remain without these: try the smaller hold-out.
            continue
        chosen = points.where(held)
        return [
            Held(label, float(loss), predict(rest, n, d, extrapolate=True).run)
            for label, loss, n, d in zip(chosen.labels, chosen.loss, chosen.num_params, chosen.tokens, strict=True)
        ]
    return []


def influence(found: Fit) -> Influence:
    """Fits without each point in turn."""
    points, count = found.points, len(found.points)
    design = Design.of(points.num_params, points.tokens)
    start_RK = np.tile(design.constants(found.law), (count, 1))
    # Law r has weight 0 for point r, so that all are refined as one batch.
    weights_RP = 1.0 - np.eye(count)
    loss_RP = np.tile(points.loss, (count, 1))
    laws = design.law(refine(design, loss_RP, weights_RP, start_RK, found.settings.objective)[0])
    ahead = _ahead(found)
    shifts = laws.loss(*ahead) / found.law.loss(*ahead) - 1
    errors_RP = np.log(points.loss / laws.at(np.s_[:, None]).loss(points.num_params, points.tokens))
    # An error in a law that did not see the point is larger than its residual by 1 / (1 - leverage), and its standard
    # deviation is that of the noise by 1 / sqrt(1 - leverage): an externally studentized residual.
    inflated = np.sqrt(1 / (1 - leverage(points, found.law)))
    others = np.sqrt((errors_RP**2 * weights_RP).sum(-1) / max(count - len(CONSTANTS) - 1, 1))
    return Influence(shifts, np.diagonal(errors_RP) / np.maximum(others * inflated, 1e-12))


def notes(found: Fit, effect: Influence | None = None) -> list[str]:
    """Sentences that a reader has to know before believing the constants."""
    return [*found.points.notes, *_bounds(found), *_undetermined(found), *_points(found, effect or influence(found))]


def _bounds(found: Fit) -> list[str]:
    law, said = found.law, []
    for name, what in (("alpha", "A and alpha"), ("beta", "B and beta")):
        value = getattr(law, name)
        if value <= EXPONENTS[0] * 1.01 or value >= EXPONENTS[1] * 0.99:
            said.append(f"{name} is at its bound {value:.3g}: {what} are not determined by these points")
    if law.E <= 0:
        said.append("E is at its bound 0: the points do not show where the loss ends")
    if law.A == 0:
        said.append("A is 0: the points show no effect of the number of parameters")
    if law.B == 0:
        said.append("B is 0: the points show no effect of the number of tokens")
    return said


def _undetermined(found: Fit) -> list[str]:
    said, wide, level = [], [], found.settings.level
    for name in ("E", "alpha", "beta"):
        low, high = found.interval(name)
        # Wider than a factor of two, and not only by rounding.
        if high > 2 * max(low, 1e-12) and high - low > 1e-6:
            wide.append(name)
    if wide:
        verb = "is" if len(wide) == 1 else "are"
        said.append(
            f"{', '.join(wide)} {verb} not identified: the {level:.0%} interval spans more than a factor of two; trust "
            "predictions near the rungs, not these constants"
        )
    # Logarithms: the constants multiply and divide one another, so that their trade-offs are straight there.
    table = np.log(np.maximum([getattr(found.draws, name) for name in CONSTANTS], 1e-300))
    for one, other in (("E", "alpha"), ("E", "beta"), ("alpha", "beta")):
        pair = table[[CONSTANTS.index(one), CONSTANTS.index(other)]]
        if (pair.std(-1) > 1e-6).all() and abs(rho := float(np.corrcoef(pair)[0, 1])) > _FLAT:
            said.append(
                f"{one} and {other} trade off against each other along a flat direction (correlation {rho:.3f})"
            )
    sizes = len(found.points.sizes)
    if sizes < 5:
        said.append(f"{sizes} sizes: the curvature in N, and so E, rests on few of them")
    return said


def _points(found: Fit, effect: Influence) -> list[str]:
    points = found.points
    count = len(points)
    # Bonferroni: the chance is that of any outlier among all points, tested on both sides.
    limit = stats.t.ppf(1 - _STRANGE / (2 * count), max(count - len(CONSTANTS) - 1, 1))
    far = f"the loss at {_AHEAD:g} times the largest compute changes by"
    said = [
        f"{points.labels[index]} looks like an outlier: {effect.strange[index]:+.1f} standard deviations from the law "
        f"of the others, and without it {far} {effect.shifts[index]:+.2%}"
        for index in np.flatnonzero(np.abs(effect.strange) > limit)
    ]
    drawn = predict(found, *_ahead(found), extrapolate=True).law
    half = (drawn.high - drawn.low) / 2 / drawn.value
    worst = int(np.argmax(np.abs(effect.shifts)))
    # An outlier has been named with its effect already.
    if half > 1e-9 and abs(effect.shifts[worst]) > max(_DECISIVE * half, 1e-4) and not said:
        said.append(
            f"the most influential point is {points.labels[worst]}: without it {far} {effect.shifts[worst]:+.2%}"
        )
    return said


def _ahead(found: Fit) -> tuple[float, float]:
    largest = int(np.argmax(found.points.flops))
    n, d = found.points.num_params[largest], found.points.tokens[largest]
    # Ten times the compute, shared equally between size and length.
    return float(n * np.sqrt(_AHEAD)), float(d * np.sqrt(_AHEAD))
