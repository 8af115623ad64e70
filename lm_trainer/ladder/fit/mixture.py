"""A law of the loss in the weights of a mixture (Ye et al. 2024, arXiv 2403.16952, equation 1).

Dimensions: P runs, M sets of the mixture, V metrics, K constants of a law, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares, minimize

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.bootstrap import central_interval, leverage_of, student_t_factor
from lm_trainer.ladder.fit.predict import Range

_SPARE_RUNS = 2
"""Number of runs more than constants, for an estimate of the noise."""
_GAPS = np.geomspace(1e-3, 1.0, 40)
"""Differences of the lowest loss and E, as fractions of the lowest loss, from which the search starts."""
_SAME = 1e-9


@dataclass(frozen=True)
class MixtureRuns:
    """Losses of runs that differ in the weights of their mixture alone."""

    sets: tuple[str, ...]
    metrics: tuple[str, ...]
    weights_PM: np.ndarray
    """Proportion of each set, with the sum 1."""
    loss_PV: np.ndarray
    labels: tuple[str, ...]
    """Names of the runs."""

    @property
    def num_constants(self) -> int:
        """Number of constants of a law: E, and one for each set."""
        return len(self.sets) + 1

    def without(self, run: int) -> MixtureRuns:
        """Returns all runs but one."""
        keep = np.arange(len(self.labels)) != run
        labels = tuple(label for index, label in enumerate(self.labels) if index != run)
        return MixtureRuns(self.sets, self.metrics, self.weights_PM[keep], self.loss_PV[keep], labels)

    def check(self) -> None:
        """Checks that the runs determine a law.

        Raises:
            UserError: if there are too few runs, or they vary the weights in too few ways.
        """
        needed = self.num_constants + _SPARE_RUNS
        if len(self.labels) < needed:
            raise UserError(
                f"{len(self.labels)} runs are too few for a law of {len(self.sets)} sets, which has "
                f"{self.num_constants} constants; it takes {needed} runs with other data.train_weights or seeds"
            )
        rank = int(np.linalg.matrix_rank(self.weights_PM, tol=1e-6))
        if rank < len(self.sets) or len(np.unique(self.weights_PM.round(9), axis=0)) < self.num_constants:
            raise UserError(
                f"the mixtures of the runs are too alike for a law of {len(self.sets)} sets; train at least "
                f"{self.num_constants} different mixtures, in which the weight of every set varies by itself"
            )


@dataclass(frozen=True)
class MixtureLaw:
    """L(r) = E + exp(t . r), with the weights r of a mixture.

    The paper has c + k exp(t . r). The weights sum to 1, so log k adds to every t.
    """

    floor: float
    """E: part of the loss that no mixture removes."""
    slopes_M: np.ndarray
    """t: exponent of a mixture of one set alone."""

    def loss(self, weights_M: np.ndarray) -> np.ndarray:
        """Computes the loss of mixtures, [..., M] -> [...]."""
        return self.floor + np.exp(weights_M @ self.slopes_M)

    def slopes(self, weights_PM: np.ndarray) -> np.ndarray:
        """Computes the derivatives of the losses with respect to the constants (P, K)."""
        e_P = np.exp(weights_PM @ self.slopes_M)
        return np.concatenate([np.ones((len(weights_PM), 1)), e_P[:, None] * weights_PM], axis=1)


def fit_mixture_law(weights_PM: np.ndarray, loss_P: np.ndarray, start: MixtureLaw | None = None) -> MixtureLaw:
    """Fits a law by least squares of the errors of log L.

    Without a start, the search begins at the best E of a grid, for which log(L - E) is linear in the weights.
    """
    lowest = float(loss_P.min())
    start = start or _best_of_grid(weights_PM, loss_P)
    bounds = np.full(weights_PM.shape[1] + 1, np.inf)

    def law_of(x_K: np.ndarray) -> MixtureLaw:
        return MixtureLaw(x_K[0] * lowest, x_K[1:])

    def errors(x_K: np.ndarray) -> np.ndarray:
        return np.log(law_of(x_K).loss(weights_PM)) - np.log(loss_P)

    def slopes(x_K: np.ndarray) -> np.ndarray:
        law = law_of(x_K)
        slopes_PK = law.slopes(weights_PM) / law.loss(weights_PM)[:, None]
        return slopes_PK * np.array([lowest, *np.ones(len(x_K) - 1)])

    first = np.array([np.clip(start.floor / lowest, 1e-6, 1 - 1e-6), *start.slopes_M])
    limits = np.array([0.0, *-bounds[1:]]), np.array([1.0, *bounds[1:]])
    result = least_squares(errors, first, slopes, bounds=limits)  # pyright: ignore[reportArgumentType] - "str" for jac
    return law_of(result.x)


def _best_of_grid(weights_PM: np.ndarray, loss_P: np.ndarray) -> MixtureLaw:
    best, lowest_error = None, np.inf
    for gap in _GAPS:
        floor = float(loss_P.min()) * (1 - gap * (1 - _SAME))
        above_P = loss_P - floor
        # An error of log(L - E) is an error of log L times L / (L - E).
        scale_P = above_P / loss_P
        slopes_M = np.linalg.lstsq(weights_PM * scale_P[:, None], np.log(above_P) * scale_P, rcond=None)[0]
        law = MixtureLaw(floor, slopes_M)
        error = float(np.square(np.log(law.loss(weights_PM) / loss_P)).sum())
        if error < lowest_error:
            best, lowest_error = law, error
    assert best is not None
    return best


@dataclass(frozen=True)
class MixtureFit:
    """Laws of all metrics, and laws of resampled runs."""

    runs: MixtureRuns
    laws: tuple[MixtureLaw, ...]
    """A law for each metric."""
    draws: tuple[tuple[MixtureLaw, ...], ...]
    """The laws of each resample."""
    noise_V: np.ndarray
    """Standard deviation of log L of a run."""
    level: float

    def mean_loss(self, weights_M: np.ndarray) -> Range:
        """Predicts the mean of the metrics by the laws, with the uncertainty of the laws."""
        drawn = [_mean_loss(laws, weights_M) for laws in self.draws]
        return Range(_mean_loss(self.laws, weights_M), *central_interval(drawn, self.level))

    def predict_run(self, metric: int, weights_M: np.ndarray) -> Range:
        """Predicts a metric of a run, with an interval that includes the noise of a single run."""
        drawn = np.array([laws[metric].loss(weights_M) for laws in self.draws])
        factor = student_t_factor(len(self.runs.labels), self.level, self.runs.num_constants)
        errors = np.random.default_rng([metric, 3]).standard_normal(drawn.shape) * self.noise_V[metric] * factor
        law = float(self.laws[metric].loss(weights_M))
        return Range(law, *central_interval(drawn * np.exp(errors), self.level))


def fit_mixture(runs: MixtureRuns, *, draws: int = 500, level: float = 0.9, seed: int = 0) -> MixtureFit:
    """Fits a law to each metric, and to resamples of its errors, as `fit_resamples` does for sizes.

    A resample draws the same runs for all metrics, because the metrics of a run share its noise.

    Raises:
        UserError: as `MixtureRuns.check`.
    """
    runs.check()
    count, constants = runs.loss_PV.shape[0], runs.num_constants
    laws = tuple(fit_mixture_law(runs.weights_PM, loss_P) for loss_P in runs.loss_PV.T)
    fitted_PV = np.stack([law.loss(runs.weights_PM) for law in laws], axis=1)
    log_errors_PV = np.log(runs.loss_PV / fitted_PV)
    leverage_PV = np.stack(
        [leverage_of(law.slopes(runs.weights_PM) / fitted_PV[:, [v]]) for v, law in enumerate(laws)], axis=1
    )
    errors_PV = log_errors_PV / np.sqrt(1 - leverage_PV)
    errors_PV = (errors_PV - errors_PV.mean(axis=0)) * student_t_factor(count, level, constants)
    chosen_RP = np.random.default_rng([seed, 1]).integers(0, count, (draws, count))
    drawn = tuple(
        tuple(
            fit_mixture_law(runs.weights_PM, fitted_PV[:, v] * np.exp(errors_PV[chosen_P, v]), law)
            for v, law in enumerate(laws)
        )
        for chosen_P in chosen_RP
    )
    noise_V = np.sqrt(np.square(log_errors_PV).sum(axis=0) / (count - constants))
    return MixtureFit(runs, laws, drawn, noise_V, level)


def _mean_loss(laws: Sequence[MixtureLaw], weights_M: np.ndarray) -> float:
    return float(np.mean([law.loss(weights_M) for law in laws]))


@dataclass(frozen=True)
class BestMixture:
    """The mixture with the lowest mean of the metrics, among weights within the range of the runs."""

    weights: tuple[Range, ...]
    """Weight of each set."""
    loss: Range
    """Mean of the metrics there, by the laws."""
    gain: Range
    """Mean of the metrics of the best of the runs' mixtures, by the laws, minus `loss`."""


def find_best_mixture(fit: MixtureFit) -> BestMixture:
    """Finds the best mixture by the laws, and by the laws of every resample."""
    runs, level = fit.runs, fit.level
    best_M = _best_weights(fit.laws, runs)
    drawn_RM = np.array([_best_weights(laws, runs) for laws in fit.draws])
    weights = tuple(Range(float(best_M[m]), *central_interval(drawn_RM[:, m], level)) for m in range(len(runs.sets)))
    trained_M = min(runs.weights_PM, key=lambda weights_M: _mean_loss(fit.laws, weights_M))

    def gain_of(laws: Sequence[MixtureLaw]) -> float:
        return _mean_loss(laws, trained_M) - _mean_loss(laws, best_M)

    gain = Range(gain_of(fit.laws), *central_interval([gain_of(laws) for laws in fit.draws], level))
    return BestMixture(weights, fit.mean_loss(best_M), gain)


def _best_weights(laws: Sequence[MixtureLaw], runs: MixtureRuns) -> np.ndarray:
    """Returns the weights (M,) with the lowest mean loss. The mean is convex, so there is only one minimum."""

    def slopes(weights_M: np.ndarray) -> np.ndarray:
        return np.mean([np.exp(weights_M @ law.slopes_M) * law.slopes_M for law in laws], axis=0)

    start_M = min(runs.weights_PM, key=lambda weights_M: _mean_loss(laws, weights_M))
    result = minimize(
        lambda weights_M: _mean_loss(laws, weights_M),
        start_M,
        jac=slopes,
        method="SLSQP",
        bounds=list(zip(runs.weights_PM.min(axis=0), runs.weights_PM.max(axis=0), strict=True)),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like},
        options={"ftol": 1e-12},
    )
    return result.x


def parse_weights(fit: MixtureFit, proportions: Mapping[str, float], *, extrapolate: bool = False) -> np.ndarray:
    """Returns the weights (M,) of a mixture by name of the set, divided by their sum.

    Raises:
        UserError: if a set is unknown or missing, a weight is no proportion, or a weight is outside the range of the
            runs and `extrapolate` is not set.
    """
    runs = fit.runs
    if different := set(proportions) ^ set(runs.sets):
        raise UserError(f"--weights: the sets are {', '.join(runs.sets)}; check {', '.join(sorted(different))}")
    weights_M = np.array([proportions[name] for name in runs.sets], float)
    if not (np.isfinite(weights_M).all() and (weights_M >= 0).all() and weights_M.sum() > 0):
        raise UserError("--weights: every weight has to be finite and at least 0, and one of them above 0")
    weights_M = weights_M / weights_M.sum()
    for name, weight, of_runs_P in zip(runs.sets, weights_M, runs.weights_PM.T, strict=True):
        low, high = of_runs_P.min(), of_runs_P.max()
        if not extrapolate and not low - _SAME <= weight <= high + _SAME:
            raise UserError(
                f"--weights: {name} has the proportion {weight:.3g}, and the runs have {low:.3g} to {high:.3g}; train "
                "a run with such a mixture, or add --extrapolate"
            )
    return weights_M


def left_out_errors(runs: MixtureRuns) -> np.ndarray:
    """Returns the errors of log L (P, V) of each run by laws that are fitted without it; NaN if these have no law."""
    errors_PV = np.full(runs.loss_PV.shape, np.nan)
    for run in range(len(runs.labels)):
        fitted = runs.without(run)
        if np.linalg.matrix_rank(fitted.weights_PM, tol=1e-6) < len(runs.sets):
            continue
        for v, loss_P in enumerate(fitted.loss_PV.T):
            law = fit_mixture_law(fitted.weights_PM, loss_P)
            errors_PV[run, v] = np.log(runs.loss_PV[run, v] / law.loss(runs.weights_PM[run]))
    return errors_PV
