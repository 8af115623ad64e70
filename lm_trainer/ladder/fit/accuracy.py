"""Direct laws of a task's accuracy, and the bootstrap of any curve of accuracies.

With the share q = (accuracy - chance) / (1 - chance) of examples that a model knows, -log q = A / C^alpha in compute,
for a fixed number of tokens per parameter, or -log q = A / N^alpha + B / D^beta (Krajewski et al. 2025, arXiv
2512.08894).

Accuracies are fitted by least squares as they are, and not by their logarithms, because the noise of a share of
examples hardly depends on the share, while its logarithm would be lost near chance and near 1.

Dimensions: R resamples, P points, J factors (compute, or N and D), K constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import leverage_of, student_t_factor
from lm_trainer.ladder.fit.law import training_flops
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.settings import FitSettings
from lm_trainer.ladder.fit.solver import Objective, Predictor, refine

FORMS = ("compute", "size and tokens")
_EXPONENTS = (0.0, 4.0)
_GRID = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Exponents from which the search starts."""
_SMALLEST_SHARE = 1e-3
"""Shares q below it, or so close to 1, are set to it for the start of the search, which takes logarithms."""


@dataclass(frozen=True)
class AbsoluteErrors(Objective):
    """The sum of squared errors of accuracies as they are."""

    def residuals(self, predicted_RP: np.ndarray, loss_RP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return predicted_RP - loss_RP, np.ones_like(predicted_RP)


@dataclass(frozen=True)
class DirectCurve:
    """The accuracy of some points as a function of the constants (a_1 .. a_J, alpha_1 .. alpha_J).

    The factors are centred in logarithms, so that a_j is the term of the middle of the points.
    """

    log_factors_PJ: np.ndarray
    chance: float

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        count = self.log_factors_PJ.shape[1]
        return np.repeat([0.0, _EXPONENTS[0]], count), np.repeat([np.inf, _EXPONENTS[1]], count)

    def predict(self, constants_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the accuracies (R, P), and their derivatives (R, P, K)."""
        a_RJ, alpha_RJ = np.split(constants_RK[..., None, :], 2, -1)
        powers_RPJ = np.exp(-alpha_RJ * self.log_factors_PJ)
        known_RP = (1 - self.chance) * np.exp(-(a_RJ * powers_RPJ).sum(-1))
        slopes = (-powers_RPJ, a_RJ * powers_RPJ * self.log_factors_PJ)
        return self.chance + known_RP, known_RP[..., None] * np.concatenate(slopes, -1)

    def starts(self, accuracy_P: np.ndarray) -> np.ndarray:
        """Returns constants (S, K) to start the search from: the best factors for each choice of exponents."""
        share_P = (accuracy_P - self.chance) / (1 - self.chance)
        target_P = -np.log(np.clip(share_P, _SMALLEST_SHARE, 1 - _SMALLEST_SHARE))
        count = self.log_factors_PJ.shape[1]
        grid = np.stack(np.meshgrid(*[_GRID] * count), -1).reshape(-1, count)
        return np.array([[*nnls(np.exp(-x * self.log_factors_PJ), target_P)[0], *x] for x in grid])


@dataclass(frozen=True)
class DirectFit:
    """A direct law of accuracy, and its bootstrap. With factors X_j, -log q = sum of A_j X_j^-alpha_j."""

    form: str
    """`compute` (one factor, C = 6 N D) or `size and tokens` (N and D)."""
    chance: float
    factors: Any
    """A_j (J,)."""
    exponents: Any
    """alpha_j (J,)."""
    factor_draws: Any
    """A_j of each resample (R, J)."""
    exponent_draws: Any
    noise: float
    """Standard deviation of a single accuracy, estimated from the residuals."""

    def accuracy(self, num_params: float, tokens: float) -> float:
        """Computes the accuracy of a model."""
        return float(self._accuracy(np.asarray(self.factors), np.asarray(self.exponents), num_params, tokens))

    def drawn_accuracy(self, num_params: float, tokens: float) -> np.ndarray:
        """Computes the accuracy of a model for each draw (R,)."""
        return self._accuracy(np.asarray(self.factor_draws), np.asarray(self.exponent_draws), num_params, tokens)

    def _accuracy(self, factors: np.ndarray, exponents: np.ndarray, num_params: float, tokens: float) -> Any:
        terms = factors * _factors(self.form, num_params, tokens) ** -exponents
        return self.chance + (1 - self.chance) * np.exp(-terms.sum(-1))

    def describe(self) -> str:
        """Returns the law as a formula with its constants."""
        names = ("C",) if self.form == "compute" else ("N", "D")
        terms = " + ".join(
            f"{a:.4g} / {name}^{alpha:.4g}" for a, name, alpha in zip(self.factors, names, self.exponents, strict=True)
        )
        share = "accuracy" if self.chance == 0 else f"(accuracy - {self.chance:.4g}) / {1 - self.chance:.4g}"
        return f"-log({share}) = {terms}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the law as plain data at full precision."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> DirectFit:
        """Reads the result of `as_dict`."""
        names = ("factors", "exponents", "factor_draws", "exponent_draws")
        arrays = {name: np.asarray(plain[name], float) for name in names}
        return cls(form=plain["form"], chance=plain["chance"], noise=plain["noise"], **arrays)


def _factors(form: str, num_params: Any, tokens: Any) -> np.ndarray:
    if form == "compute":
        return np.stack([training_flops(num_params, tokens)], -1)
    return np.stack(np.broadcast_arrays(num_params, tokens), -1)


def fit_direct(points: Points, form: str, settings: FitSettings, *, draws: int) -> DirectFit:
    """Fits a direct law to the accuracies of the points.

    Args:
        points: points with accuracies.
        form: one of `FORMS`.
        settings: seed and level of the bootstrap.
        draws: number of resamples; 0 leaves the draws empty.

    Raises:
        UserError: if there are too few points for the form.
    """
    assert points.task is not None
    factors_PJ = _factors(form, points.num_params, points.tokens)
    means_J = np.log(factors_PJ).mean(0)
    curve = DirectCurve(np.log(factors_PJ) - means_J, points.chance)
    constants = 2 * factors_PJ.shape[1]
    if len(points) < constants + 2:
        raise UserError(f"--task: the form in {form} takes {constants + 2} points, there are {len(points)}")
    best_K = fit_curve(curve, points.task, curve.starts(points.task))
    drawn_RK = resample_curve(curve, points.task, best_K, settings, draws=draws)

    def plain(constants_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a_RJ, alpha_RJ = np.split(constants_RK, 2, -1)
        return a_RJ * np.exp(alpha_RJ * means_J), alpha_RJ

    noise = curve_noise(curve, points.task, best_K)
    return DirectFit(form, points.chance, *plain(best_K), *plain(drawn_RK), noise)


def fit_curve(curve: Predictor, accuracy_P: np.ndarray, starts_SK: np.ndarray) -> np.ndarray:
    """Returns the constants (K,) with the least squared errors that the search finds from all starts."""
    accuracy_SP = np.broadcast_to(accuracy_P, (len(starts_SK), len(accuracy_P)))
    fitted_SK, values_S = refine(curve, accuracy_SP, np.ones_like(accuracy_SP), starts_SK, AbsoluteErrors())
    return fitted_SK[np.argmin(values_S)]


def curve_noise(curve: Predictor, accuracy_P: np.ndarray, constants_K: np.ndarray) -> float:
    """Estimates the standard deviation of a single accuracy from the residuals of a fitted curve."""
    errors_P = accuracy_P - curve.predict(constants_K)[0]
    return float(np.sqrt((errors_P**2).sum() / max(len(errors_P) - len(constants_K), 1)))


def resample_curve(
    curve: Predictor,
    accuracy_P: np.ndarray,
    constants_K: np.ndarray,
    settings: FitSettings,
    *,
    draws: int,
    fixed: int = 0,
) -> np.ndarray:
    """Fits the constants (R, K) to resamples of the errors, as `fit_resamples` does for losses.

    The errors are corrected for leverage, centred, and widened by Student's t. The last `fixed` points of the curve are
    no measurements: every resample has them as they are.
    """
    fitted_P, slopes_PK = curve.predict(constants_K)
    count = len(accuracy_P) - fixed
    errors_P = ((accuracy_P - fitted_P) / np.sqrt(1 - leverage_of(slopes_PK)))[:count]
    errors_P = (errors_P - errors_P.mean()) * student_t_factor(count, settings.level, len(constants_K))
    rng = np.random.default_rng([settings.seed, 2])
    sampled_RP = np.tile(accuracy_P, (draws, 1))
    sampled_RP[:, :count] = fitted_P[:count] + rng.choice(errors_P, (draws, count))
    start_RK = np.tile(constants_K, (draws, 1))
    return refine(curve, sampled_RP, np.ones_like(sampled_RP), start_RK, AbsoluteErrors())[0]
