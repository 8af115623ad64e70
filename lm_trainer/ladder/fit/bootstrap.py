"""Intervals of a fit by the bootstrap (Efron and Tibshirani 1993): the law is fitted again to resampled measurements.

Dimensions: R resamples, P points, K constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.settings import NUM_CONSTANTS, Settings
from lm_trainer.ladder.fit.solver import Design, refine

_FEWEST_RUNS = 8
_ATTEMPTS = 100
"""Resamples tried for each one that is wanted."""


def resample(points: Points, law: Law, settings: Settings) -> Law:
    """Laws of resamples, as arrays.

    `residuals` keeps every N and D and draws errors of log L anew: each is divided by sqrt(1 - its leverage), all are
    centred, and widened by the ratio of Student's t to the normal quantile, so that few points do not give too narrow
    intervals. `points` draws points and `runs` whole runs with replacement.

    Raises:
        UserError: where there are too few to draw from.
    """
    draws, unit = settings.draws, settings.resample
    design, rng = Design.of(points.num_params, points.tokens), np.random.default_rng([settings.seed, 1])
    # All start from the law of the points themselves, near which theirs lie: no grid is searched again.
    start_RK = np.tile(design.constants(law), (draws, 1))
    if unit == "residuals":
        errors_P = residual_errors(points, law) * student_factor(len(points), settings.level)
        drawn_RP = rng.choice(errors_P, (draws, len(points)))
        loss_RP = law.loss(points.num_params, points.tokens) * np.exp(drawn_RP)
        weights_RP = np.ones_like(loss_RP)
    else:
        loss_RP = np.tile(points.loss, (draws, 1))
        weights_RP = _weights(points, unit, draws, rng)
    return design.law(refine(design, loss_RP, weights_RP, start_RK, settings.objective)[0])


def residual_errors(points: Points, law: Law) -> np.ndarray:
    """Errors of log L (P,), corrected for how much each point pulls the law towards itself, and centred.

    A residual has the variance s^2 (1 - leverage) of the noise s^2 (Davison and Hinkley 1997, section 6.2).
    """
    errors_P = np.log(points.loss / law.loss(points.num_params, points.tokens))
    return (corrected := errors_P / np.sqrt(1 - leverage(points, law))) - corrected.mean()


def leverage(points: Points, law: Law) -> np.ndarray:
    """Leverage of each point (P,), between 0 and 1: the diagonal of the hat matrix of the linearised law."""
    design = Design.of(points.num_params, points.tokens)
    predicted_P, slopes_PK = design.predict(design.constants(law))
    # J (J'J)^-1 J' = U U' without inverting anything; directions that the points do not determine are left out.
    u_PK, size_K, _ = np.linalg.svd(slopes_PK / predicted_P[:, None], full_matrices=False)
    kept_PK = u_PK[:, size_K > 1e-12 * size_K[0]]
    # A point that decides a constant alone has leverage 1 and no residual; the bound keeps the division finite.
    return np.minimum((kept_PK**2).sum(-1), 1 - 1 / len(points))


def student_factor(count: int, level: float) -> float:
    """Student's t over the normal quantile, for the degrees of freedom that the constants leave."""
    tail = (1 + level) / 2
    return float(stats.t.ppf(tail, max(count - NUM_CONSTANTS, 1)) / stats.norm.ppf(tail))


def _weights(points: Points, unit: str, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Counts of each point in each resample (R, P); resamples that no law can be fitted to are drawn again."""
    names = points.runs if unit == "runs" else range(len(points))
    units, of_P = np.unique(np.array(names), return_inverse=True)
    if unit == "runs" and len(units) < _FEWEST_RUNS:
        raise UserError(
            f"--resample runs: {len(units)} runs are too few to draw from, it takes {_FEWEST_RUNS}; train more sizes "
            "or seeds, or take --resample residuals"
        )
    found = []
    for _ in range(draws * _ATTEMPTS):
        # Drawing units with replacement is weighting points by counts: all resamples keep the shape of the points.
        count_P = np.bincount(rng.integers(0, len(units), len(units)), minlength=len(units))[of_P]
        chosen = count_P > 0
        if len(np.unique(points.num_params[chosen])) >= 3 and chosen.sum() > NUM_CONSTANTS:
            found.append(count_P.astype(float))
        if len(found) == draws:
            return np.array(found)
    raise UserError(f"--resample {unit}: hardly a resample has three sizes and six points; take --resample residuals")


def interval(values: Any, level: float) -> tuple[float, float]:
    """The central interval that holds `level` of the draws."""
    # A draw without an optimum is NaN, and not part of the interval.
    with np.errstate(invalid="ignore"):
        low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
