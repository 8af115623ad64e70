"""The sigmoid from the loss to an accuracy.

acc = a / (1 + exp(k (L - L0))) + b (Bhagia et al. 2024, arXiv 2412.04403, step 2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.accuracy import fit_curve, resample_curve
from lm_trainer.ladder.fit.settings import FitSettings

_LOWER = (0.0, 1e-3, 0.0, 0.0)
_UPPER = (1.0, 1e3, 1e3, 1.0)
_IDEAL = (0.0, 1.0)
"""Loss and accuracy of the ideal point."""
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


@dataclass(frozen=True)
class SigmoidCurve:
    """The accuracy of some points as a function of the constants (a, k, L0, b).

    Dimensions: R resamples, P points with the ideal one, K constants.
    """

    loss_P: np.ndarray

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(_LOWER), np.array(_UPPER)

    def predict(self, constants_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the accuracies (R, P), and their derivatives (R, P, K)."""
        a, k, middle, b = (column[..., None] for column in np.moveaxis(constants_RK, -1, 0))
        share_RP = AccuracySigmoid(1.0, k, middle, 0.0).accuracy(self.loss_P)
        steep_RP = a * share_RP * (1 - share_RP)
        slopes = (share_RP, -steep_RP * (self.loss_P - middle), steep_RP * k, np.ones_like(share_RP))
        return a * share_RP + b, np.stack(slopes, -1)


def fit_accuracy_sigmoid(
    loss: np.ndarray, accuracy: np.ndarray, settings: FitSettings, *, draws: int
) -> tuple[AccuracySigmoid, AccuracySigmoid]:
    """Fits the sigmoid by least squares to the points and to resamples, each with the ideal point (loss 0, accuracy 1)
    of the paper.

    Args:
        loss: losses of the points.
        accuracy: accuracies of the points.
        settings: seed and level of the bootstrap.
        draws: number of resamples of the errors.

    Returns:
        The sigmoid fitted to the points, and the sigmoids fitted to the resamples, whose constants are arrays.

    Raises:
        UserError: if there are fewer than six points, or the accuracy is constant.
    """
    best_K = search_sigmoid(loss, accuracy)
    curve = SigmoidCurve(np.append(loss, _IDEAL[0]))
    drawn_RK = resample_curve(curve, np.append(accuracy, _IDEAL[1]), best_K, settings, draws=draws, fixed=1)
    return AccuracySigmoid(*best_K), AccuracySigmoid(*drawn_RK.T)


def search_sigmoid(loss: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Returns the constants (a, k, L0, b) of the best sigmoid. Raises the errors of `fit_accuracy_sigmoid`."""
    if len(loss) < _FEWEST:
        raise UserError(f"--task: a sigmoid needs at least {_FEWEST} points, there are {len(loss)}")
    if np.ptp(accuracy) == 0:
        raise UserError("--task: the accuracy is the same at all points, so that nothing follows from the loss")
    # The ideal point fixes the upper end of the sigmoid, far from all measured models.
    curve, accuracy = SigmoidCurve(np.append(loss, _IDEAL[0])), np.append(accuracy, _IDEAL[1])
    middle, spread, low = float(np.median(loss)), max(float(np.ptp(loss)), 1e-3), float(accuracy.min())
    # The objective has several local minima. Start from a grid of steepness and midpoint.
    starts = [
        (1 - 0.9 * low, steep / spread, middle + shift * spread, 0.9 * low)
        for steep in (1, 3, 8)
        for shift in (-1.0, -0.5, 0.0)
    ]
    return fit_curve(curve, accuracy, np.array(starts))
