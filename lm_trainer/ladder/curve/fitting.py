"""Fits the law of loss curves to the rungs of a ladder, with draws for the band of a prediction.

Shape letters: R is the number of runs, W the number of windows of all runs, D the number of draws.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.curve.areas import RatePlan, Windows
from lm_trainer.ladder.curve.law import CurveDesign, CurveLaw
from lm_trainer.ladder.curve.rungs import RungCurve
from lm_trainer.ladder.fit.law import training_flops
from lm_trainer.ladder.fit.settings import check_level

_FEWEST_SIZES = 3
_SIZE_CONSTANTS = 3
"""Constants that the mean losses of the runs determine: L0, B and beta."""
_DRAWN_RATIO = 1.1
"""Ratio between the horizons that are tried for a resample."""
_BLOCKS = 8
"""Number of blocks into which the errors of a curve are cut when they are drawn."""


@dataclass(frozen=True)
class CurveFit:
    """A fitted law of loss curves, with laws fitted to resampled curves."""

    curves: tuple[RungCurve, ...]
    law: CurveLaw
    draws: tuple[CurveLaw, ...]
    level: float
    seed: int
    offset: float
    """Standard deviation of the relative error of a complete run, for instance by its seed."""
    wander: float
    """Standard deviation of the relative errors along a run that are not the noise of its batches."""
    batch_noise: float
    """Standard deviation of the relative error of a step's loss, times the square root of the tokens of its batch."""

    @property
    def freedom(self) -> int:
        """Number of degrees of freedom of `offset`."""
        return len(self.curves) - _SIZE_CONSTANTS

    @property
    def max_flops(self) -> float:
        """Compute (6 N D) of the largest rung."""
        return max(float(training_flops(curve.plan.num_params, curve.plan.tokens)) for curve in self.curves)

    @property
    def widening(self) -> float:
        """Ratio of Student's t quantile to the normal quantile for `offset`."""
        return _student_ratio(self.freedom, self.level)

    def noise(self, plan: RatePlan, windows: Windows) -> float:
        """Returns the standard deviation of the relative error of a window's mean, without the error of the run."""
        return float(np.hypot(self.wander, self.batch_noise / np.sqrt(plan.batch_tokens * windows.length)))

    def digest(self) -> str:
        """Computes the SHA-256 of the curves and of all fitted laws."""
        content = [
            [law.as_dict() for law in (self.law, *self.draws)],
            *(curve.loss_W.tolist() for curve in self.curves),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Returns the law and the noise as plain data."""
        return {
            "law": self.law.as_dict(),
            "rungs": [curve.name for curve in self.curves],
            "level": self.level,
            "offset": self.offset,
            "wander": self.wander,
            "draws": len(self.draws),
            "seed": self.seed,
            "sha256": self.digest(),
        }


def fit_curves(
    curves: Sequence[RungCurve], notes: Sequence[str] = (), *, level: float = 0.9, draws: int = 100, seed: int = 0
) -> CurveFit:
    """Fits the law to all curves together, and to resampled curves.

    A resampled curve is the fitted one, times an error of the complete run, times errors along the run. The latter are
    drawn in blocks of consecutive windows, because neighbouring windows err alike.

    Args:
        curves: curves of at least three sizes and four runs.
        notes: sentences about runs without a curve, for messages.
        level: confidence level of the band.
        draws: number of resamples.
        seed: seed of the resamples.

    Raises:
        UserError: if the curves do not determine the law and its band.
    """
    _check_curves(curves, notes)
    check_level(level)
    if draws < 20:
        raise UserError(f"--draws {draws}: a band needs at least 20")
    design = CurveDesign([c.plan for c in curves], [c.windows for c in curves])
    loss_W = np.concatenate([curve.loss_W for curve in curves])
    constants_K, horizon = design.fit(loss_W)
    fitted_W = design.predict(constants_K, horizon)
    runs = np.cumsum([len(curve.loss_W) for curve in curves])[:-1]
    errors = np.split(np.log(loss_W / fitted_W), runs)
    means_R = np.array([errors_W.mean() for errors_W in errors])
    within = [errors_W - mean for errors_W, mean in zip(errors, means_R, strict=True)]
    freedom = len(curves) - _SIZE_CONSTANTS
    offset = float(np.sqrt((means_R**2).sum() / freedom))
    drawn_offset = offset * _student_ratio(freedom, level)
    rng = np.random.default_rng([seed, 5])
    laws = []
    for _ in range(draws):
        drawn = [_draw_blocks(errors_W, rng) + drawn_offset * rng.standard_normal() for errors_W in within]
        drawn_W = fitted_W * np.exp(np.concatenate(drawn))
        laws.append(design.to_law(*design.refine_horizon(drawn_W, constants_K, horizon, _DRAWN_RATIO)[:2]))
    batch_noise = float(np.mean([curve.noise * np.sqrt(curve.plan.batch_tokens) for curve in curves]))
    wander = [
        np.mean(errors_W**2) - curve.noise**2 / curve.windows.length
        for errors_W, curve in zip(within, curves, strict=True)
    ]
    return CurveFit(
        tuple(curves),
        design.to_law(constants_K, horizon),
        tuple(laws),
        level,
        seed,
        offset,
        float(np.sqrt(max(np.mean(wander), 0.0))),
        batch_noise,
    )


def _check_curves(curves: Sequence[RungCurve], notes: Sequence[str]) -> None:
    missing = "".join(f"\n  {note}" for note in notes)
    sizes = len({curve.plan.num_params for curve in curves})
    if sizes < _FEWEST_SIZES:
        raise UserError(
            f"{len(curves)} curves of {sizes} sizes do not determine how curves depend on the size; it takes "
            f"{_FEWEST_SIZES} sizes{missing}"
        )
    if len(curves) <= _SIZE_CONSTANTS:
        raise UserError(
            f"{len(curves)} curves do not show how much runs differ; train a fourth size, or set num_seeds to 2"
            f"{missing}"
        )


def _student_ratio(freedom: int, level: float) -> float:
    tail = (1 + level) / 2
    return float(stats.t.ppf(tail, freedom) / stats.norm.ppf(tail))


def _draw_blocks(errors_W: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws blocks of consecutive errors, with replacement, up to the same length (Künsch 1989)."""
    length = -(-len(errors_W) // _BLOCKS)
    starts = rng.integers(0, len(errors_W) - length + 1, _BLOCKS)
    return np.concatenate([errors_W[start : start + length] for start in starts])[: len(errors_W)]
