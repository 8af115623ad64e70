"""Evidence against a fit: undetermined constants, overly influential points, and errors on held-out points.

Dimensions: R laws (one per left-out point), P points.
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
from lm_trainer.ladder.fit.repeats import REPEATS, RepeatLaw, make_design
from lm_trainer.ladder.fit.solver import EXPONENTS, refine

_EXTRAPOLATION = 10.0
"""Multiple of the largest rung's compute at which the effect of single points is measured."""
_OUTLIER_CHANCE = 0.01
"""Probability that any point is falsely reported as an outlier."""
_TRADE_OFF = 0.98
"""Correlation of two constants over the draws above which they are reported as trading off."""
_INFLUENTIAL = 0.5
"""Shift that a single point causes, as a fraction of the interval's half-width, above which it is reported."""


class HeldOutPoint(NamedTuple):
    """A held-out point, and its prediction by a law fitted to the other points."""

    label: str
    measured: float
    predicted: Range

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if the prediction is too high."""
        return self.predicted.value / self.measured - 1


@dataclass(frozen=True)
class Influence:
    """Influence of single points on a fit. All arrays have shape (P,)."""

    shifts: np.ndarray
    """Relative change of the predicted loss at ten times the compute of the largest rung if the point is left out."""
    z_scores: np.ndarray
    """Error of each point under a law fitted to the other points, in standard deviations of their noise."""


def backtest(fitted: Fit) -> list[HeldOutPoint]:
    """Predicts the points of the largest size, or of the largest compute, with a fit to all other points.

    The largest compute is held out if too few sizes would remain otherwise. Returns an empty list if too few points
    would remain in both cases.
    """
    points = fitted.points
    for held in (points.num_params == points.sizes[-1], points.flops == points.flops.max()):
        try:
            reduced = fit(points.select(~held), fitted.settings)
        except UserError:
            # If too few sizes or points remain, try the smaller hold-out.
            continue
        target = points.select(held)
        return [
            HeldOutPoint(
                target.labels[i],
                float(target.loss[i]),
                predict(
                    reduced,
                    target.num_params[i],
                    target.tokens[i],
                    unique_tokens=None if target.unique_tokens is None else target.unique_tokens[i],
                    extrapolate=True,
                ).run,
            )
            for i in range(len(target))
        ]
    return []


def measure_influence(fitted: Fit) -> Influence:
    """Refits without each point, one at a time."""
    points, count = fitted.points, len(fitted.points)
    design = make_design(points)
    start_RK = np.tile(design.to_constants(fitted.law), (count, 1))
    # Point r has weight 0 in the fit of law r, so all laws are refined as one batch.
    weights_RP = 1.0 - np.eye(count)
    loss_RP = np.tile(points.loss, (count, 1))
    laws = design.to_law(refine(design, loss_RP, weights_RP, start_RK, fitted.settings.objective)[0])
    ahead = _extrapolation_target(fitted)
    shifts = laws.loss(*ahead) / fitted.law.loss(*ahead) - 1
    errors_RP = np.log(points.loss / points.fitted_loss(laws.select(np.s_[:, None])))
    # The error of a left-out point is residual / (1 - leverage), with the standard deviation noise / sqrt(1 -
    # leverage). Their ratio is the externally studentized residual.
    inflated = np.sqrt(1 / (1 - leverage(points, fitted.law)))
    noise_R = np.sqrt((errors_RP**2 * weights_RP).sum(-1) / max(count - len(fitted.law.names) - 1, 1))
    return Influence(shifts, np.diagonal(errors_RP) / np.maximum(noise_R * inflated, 1e-12))


def collect_caveats(fitted: Fit, effect: Influence | None = None) -> list[str]:
    """Lists caveats that users should read before they trust the constants."""
    return [
        *fitted.points.notes,
        *_bound_caveats(fitted),
        *_identifiability_caveats(fitted),
        *_point_caveats(fitted, effect or measure_influence(fitted)),
    ]


def _bound_caveats(fitted: Fit) -> list[str]:
    law, messages = fitted.law, []
    for name, constants in (("alpha", "A and alpha"), ("beta", "B and beta")):
        value = getattr(law, name)
        if value <= EXPONENTS[0] * 1.01 or value >= EXPONENTS[1] * 0.99:
            messages.append(f"{name} is at its bound {value:.3g}: {constants} are not determined by these points")
    if isinstance(law, RepeatLaw) and not 1.01 * REPEATS[0] < law.repeats < 0.99 * REPEATS[1]:
        messages.append(
            f"repeats is at its bound {law.repeats:.3g}: the points do not show where repeated text loses its worth"
        )
    if law.E <= 0:
        messages.append("E is at its bound 0: the points do not show where the loss ends")
    if law.A == 0:
        messages.append("A is 0: the points show no effect of the number of parameters")
    if law.B == 0:
        messages.append("B is 0: the points show no effect of the number of tokens")
    return messages


def _identifiability_caveats(fitted: Fit) -> list[str]:
    messages, unidentified, level = [], [], fitted.settings.level
    for name in fitted.law.names:
        # A and B are in units that depend on the exponents.
        if name in ("A", "B"):
            continue
        low, high = fitted.interval(name)
        # The interval spans more than a factor of two, by more than rounding.
        if high > 2 * max(low, 1e-12) and high - low > 1e-6:
            unidentified.append(name)
    if unidentified:
        verb = "is" if len(unidentified) == 1 else "are"
        messages.append(
            f"{', '.join(unidentified)} {verb} not identified: the {level:.0%} interval spans more than a factor of "
            "two; trust predictions near the rungs, not these constants"
        )
    # Logarithms: constants multiply and divide each other, so their trade-offs are linear in log space.
    table = np.log(np.maximum([getattr(fitted.draws, name) for name in CONSTANTS], 1e-300))
    for first, second in (("E", "alpha"), ("E", "beta"), ("alpha", "beta")):
        pair = table[[CONSTANTS.index(first), CONSTANTS.index(second)]]
        if (pair.std(-1) > 1e-6).all() and abs(rho := float(np.corrcoef(pair)[0, 1])) > _TRADE_OFF:
            messages.append(
                f"{first} and {second} trade off against each other along a flat direction (correlation {rho:.3f})"
            )
    sizes = len(fitted.points.sizes)
    if sizes < 5:
        messages.append(f"{sizes} sizes: the curvature in N, and so E, rests on few of them")
    return messages


def _point_caveats(fitted: Fit, effect: Influence) -> list[str]:
    points = fitted.points
    count = len(points)
    # Bonferroni correction: two-sided, for the probability of any false outlier among all points.
    limit = stats.t.ppf(1 - _OUTLIER_CHANCE / (2 * count), max(count - len(fitted.law.names) - 1, 1))
    far = f"the loss at {_EXTRAPOLATION:g} times the largest compute changes by"
    messages = [
        f"{points.labels[index]} looks like an outlier: {effect.z_scores[index]:+.1f} standard deviations from the law "
        f"of the others, and without it {far} {effect.shifts[index]:+.2%}"
        for index in np.flatnonzero(np.abs(effect.z_scores) > limit)
    ]
    drawn = predict(fitted, *_extrapolation_target(fitted), extrapolate=True).law
    half = (drawn.high - drawn.low) / 2 / drawn.value
    worst = int(np.argmax(np.abs(effect.shifts)))
    # Outliers are reported above together with their effect.
    if half > 1e-9 and abs(effect.shifts[worst]) > max(_INFLUENTIAL * half, 1e-4) and not messages:
        messages.append(
            f"the most influential point is {points.labels[worst]}: without it {far} {effect.shifts[worst]:+.2%}"
        )
    return messages


def _extrapolation_target(fitted: Fit) -> tuple[float, float]:
    largest = int(np.argmax(fitted.points.flops))
    n, d = fitted.points.num_params[largest], fitted.points.tokens[largest]
    # Ten times the compute, split equally between size and length.
    return float(n * np.sqrt(_EXTRAPOLATION)), float(d * np.sqrt(_EXTRAPOLATION))
