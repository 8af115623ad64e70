"""The sigmoid from the loss to an accuracy.

acc = a / (1 + exp(k (L - L0))) + b (Bhagia et al. 2024, arXiv 2412.04403, step 2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError

_LOWER = (0.0, 1e-3, 0.0, 0.0)
_UPPER = (1.0, 1e3, 1e3, 1.0)
_FEWEST = 6
"""Minimum number of points for four constants and an estimate of their spread."""


@dataclass(frozen=True)
class AccuracySigmoid:
    """Constants of the sigmoid: numbers, or arrays of equal shape for many sigmoids."""

    a: Any
    k: Any
    L0: Any
    b: Any

    def accuracy(self, loss: Any) -> Any:
        """Computes the accuracy at a loss. It approaches b for losses far above L0, and a + b for losses far below."""
        # Beyond 500 the exponential would overflow, and the sigmoid is flat anyway.
        return self.a / (1 + np.exp(np.clip(self.k * (loss - self.L0), -500, 500))) + self.b

    def as_dict(self) -> dict[str, Any]:
        """Returns the constants as plain data at full precision."""
        return {name: np.asarray(value).tolist() for name, value in asdict(self).items()}


def fit_accuracy_sigmoid(
    loss: np.ndarray, accuracy: np.ndarray, *, draws: int, seed: int
) -> tuple[AccuracySigmoid, AccuracySigmoid]:
    """Fits the sigmoid by least squares to the points and to resamples, each with the ideal point (loss 0, accuracy 1)
    of the paper.

    Args:
        loss: losses of the points.
        accuracy: accuracies of the points.
        draws: number of resamples.
        seed: seed of the resamples.

    Returns:
        The sigmoid fitted to the points, and the sigmoids fitted to the resamples, whose constants are arrays.

    Raises:
        UserError: if there are fewer than six points, or the accuracy is constant.
    """
    if len(loss) < _FEWEST:
        raise UserError(f"--task: a sigmoid needs at least {_FEWEST} points, there are {len(loss)}")
    if np.ptp(accuracy) == 0:
        raise UserError("--task: the accuracy is the same at all points, so that nothing follows from the loss")
    best = _fit_sigmoid(loss, accuracy, None)
    rng = np.random.default_rng([seed, 2])
    rows = []
    while len(rows) < draws:
        chosen = rng.integers(0, len(loss), len(loss))
        # Resamples with too few different points or a constant accuracy determine no sigmoid, and are redrawn.
        if len(np.unique(chosen)) >= _FEWEST - 1 and np.ptp(accuracy[chosen]) > 0:
            rows.append(_fit_sigmoid(loss[chosen], accuracy[chosen], best))
    return AccuracySigmoid(*best), AccuracySigmoid(*np.array(rows).reshape(-1, 4).T)


def _fit_sigmoid(loss: np.ndarray, accuracy: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    from scipy.optimize import least_squares

    # The ideal point fixes the upper end of the sigmoid, far from all measured models.
    loss, accuracy = np.append(loss, 0.0), np.append(accuracy, 1.0)

    def accuracy_errors(x: np.ndarray) -> np.ndarray:
        return AccuracySigmoid(*x).accuracy(loss) - accuracy

    middle, spread = float(np.median(loss[:-1])), max(float(np.ptp(loss[:-1])), 1e-3)
    low = float(accuracy.min())
    # The objective has several local minima. Start from a grid of steepness and midpoint, or for a resample from the
    # fit of all points.
    starts = (
        [start]
        if start is not None
        else [
            np.array([1 - 0.9 * low, steep / spread, middle + shift * spread, 0.9 * low])
            for steep in (1, 3, 8)
            for shift in (-1.0, -0.5, 0.0)
        ]
    )
    fits = [
        least_squares(accuracy_errors, np.clip(x, _LOWER, _UPPER), bounds=(_LOWER, _UPPER), x_scale="jac")
        for x in starts
    ]
    return min(fits, key=lambda result: result.cost).x
