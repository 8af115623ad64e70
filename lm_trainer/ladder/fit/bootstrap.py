"""Intervals of a fit by the bootstrap (Efron and Tibshirani 1993): the law is refitted to resampled measurements.

Dimensions: R resamples, P points, K constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.repeats import make_design
from lm_trainer.ladder.fit.settings import FitSettings
from lm_trainer.ladder.fit.solver import refine

_FEWEST_RUNS = 8
_ATTEMPTS = 100
"""Maximum number of attempts per resample."""


def fit_resamples(points: Points, law: Law, settings: FitSettings) -> Law:
    """Fits a law to each resample of the points; returns them as one `Law` whose constants are arrays.

    `residuals` keeps every N and D, and redraws the errors of log L. Each error is divided by sqrt(1 - leverage of its
    point). The errors are then centred, and scaled by the ratio of Student's t quantile to the normal quantile, because
    intervals would otherwise be too narrow with few points. `points` draws points with replacement, and `runs` draws
    complete runs with replacement.

    Raises:
        UserError: if there are too few points or runs to draw from.
    """
    draws, unit = settings.draws, settings.resample
    design, rng = make_design(points), np.random.default_rng([settings.seed, 1])
    # Start from the law of the original points instead of a grid search, since it is close to all other laws.
    start_RK = np.tile(design.to_constants(law), (draws, 1))
    if unit == "residuals":
        errors_P = residual_errors(points, law) * student_t_factor(len(points), settings.level, len(law.names))
        sampled_RP = rng.choice(errors_P, (draws, len(points)))
        loss_RP = points.fitted_loss(law) * np.exp(sampled_RP)
        weights_RP = np.ones_like(loss_RP)
    else:
        loss_RP = np.tile(points.loss, (draws, 1))
        weights_RP = _draw_counts(points, len(law.names), settings, rng)
    return design.to_law(refine(design, loss_RP, weights_RP, start_RK, settings.objective)[0])


def residual_errors(points: Points, law: Law) -> np.ndarray:
    """Computes the errors of log L (P,), corrected for the leverage of each point and centred.

    If the noise has the variance s^2, a residual has the variance s^2 (1 - leverage) (Davison and Hinkley 1997, section
    6.2).
    """
    errors_P = np.log(points.loss / points.fitted_loss(law))
    return (corrected := errors_P / np.sqrt(1 - leverage(points, law))) - corrected.mean()


def leverage(points: Points, law: Law) -> np.ndarray:
    """Computes the leverage of each point (P,), from 0 to 1: the diagonal of the linearised law's hat matrix."""
    design = make_design(points)
    predicted_P, slopes_PK = design.predict(design.to_constants(law))
    return leverage_of(slopes_PK / predicted_P[:, None])


def leverage_of(slopes_PK: np.ndarray) -> np.ndarray:
    """Computes the leverage of each point (P,) from the derivatives of its value with respect to the constants."""
    # J (J'J)^-1 J' = U U' needs no inverse. Directions that the points do not determine are left out.
    u_PK, size_K, _ = np.linalg.svd(slopes_PK, full_matrices=False)
    determined_PK = u_PK[:, size_K > 1e-12 * size_K[0]]
    # If a constant is determined by a single point, this point has leverage 1 and no residual. The bound avoids a
    # division by zero.
    return np.minimum((determined_PK**2).sum(-1), 1 - 1 / len(slopes_PK))


def student_t_factor(count: int, level: float, constants: int) -> float:
    """Computes the ratio of Student's t quantile to the normal quantile. Each constant uses up a degree of freedom."""
    tail = (1 + level) / 2
    return float(stats.t.ppf(tail, max(count - constants, 1)) / stats.norm.ppf(tail))


def _draw_counts(points: Points, constants: int, settings: FitSettings, rng: np.random.Generator) -> np.ndarray:
    """Draws the count of each point in each resample (R, P). Redraws resamples without enough sizes or points."""
    unit, draws = settings.resample, settings.draws
    names = points.runs if unit == "runs" else range(len(points))
    units, of_P = np.unique(np.array(names), return_inverse=True)
    if unit == "runs" and len(units) < _FEWEST_RUNS:
        raise UserError(
            f"--resample runs: {len(units)} runs are too few to draw from, it takes {_FEWEST_RUNS}; train more sizes "
            "or seeds, or take --resample residuals"
        )
    weights = []
    for _ in range(draws * _ATTEMPTS):
        # Drawing units with replacement is the same as weighting points by counts, which gives all resamples the same
        # shape.
        count_P = np.bincount(rng.integers(0, len(units), len(units)), minlength=len(units))[of_P]
        chosen = count_P > 0
        if len(np.unique(points.num_params[chosen])) >= 3 and chosen.sum() > constants:
            weights.append(count_P.astype(float))
        if len(weights) == draws:
            return np.array(weights)
    raise UserError(f"--resample {unit}: hardly a resample has three sizes and six points; take --resample residuals")


def central_interval(values: Any, level: float) -> tuple[float, float]:
    """Returns the central interval that contains a fraction `level` of the draws."""
    # A draw without an optimum is NaN, and is ignored.
    with np.errstate(invalid="ignore"):
        low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
