"""Solver for the law: variable projection, and Levenberg-Marquardt for many sets of losses at once.

Variable projection is from Golub and Pereyra 1973, and the damping of the refinement is from Marquardt 1963. A
bootstrap fits hundreds of laws to the same points. That would be slow one by one, so all sets are refined as one batch.

Dimensions: R sets of losses or weights, P points, K the five constants E, a, b, alpha, beta, where a and b are A and B
for N and D in units of their geometric means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import nnls
from scipy.special import huber

from lm_trainer.ladder.fit.law import Law

EXPONENTS = (0.01, 2.0)
"""Bounds of alpha and beta."""
_GRID = 24
"""Values of each exponent on the grid that `fit_by_variable_projection` searches."""
_STARTS = 4
"""Number of grid cells to refine."""
_ITERATIONS = 400
"""Maximum number of steps."""
_TOLERANCE = 1e-13
"""A set is finished when a step reduces the objective by less than this fraction."""


@dataclass(frozen=True)
class Objective:
    """Objective of a fit: the sum of squared relative errors, or the Huber loss of the errors of log L."""

    huber: float | None = None
    """Threshold of the Huber loss, in log L; None for squared relative errors."""

    def residuals(self, predicted_RP: np.ndarray, loss_RP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the errors (R, P), and their derivatives with respect to the predicted loss."""
        if self.huber is None:
            return predicted_RP / loss_RP - 1, np.broadcast_to(1 / loss_RP, predicted_RP.shape)
        # A trial step may predict a loss of 0, which has no logarithm.
        safe_RP = np.maximum(predicted_RP, 1e-30)
        return np.log(safe_RP / loss_RP), 1 / safe_RP

    def weights(self, errors_RP: np.ndarray) -> np.ndarray:
        """Computes weights (R, P) with which the squared errors have the gradient of the objective."""
        if self.huber is None:
            return np.ones_like(errors_RP)
        return self.huber / np.maximum(np.abs(errors_RP), self.huber)

    def value(self, errors_RP: np.ndarray, weights_RP: np.ndarray) -> np.ndarray:
        """Computes half the sum of squares, or the sum of Huber losses, of each set (R,)."""
        half_RP = errors_RP**2 / 2 if self.huber is None else huber(self.huber, errors_RP)
        return (weights_RP * half_RP).sum(-1)


@dataclass(frozen=True)
class Design:
    """Logarithms of N and D of the points, minus their means.

    Because of the centring, a and b are the values of the terms in the middle of the points, and hardly depend on the
    exponents. Without it, A and B would change by powers of ten for a small step in an exponent.
    """

    log_n_P: np.ndarray
    log_d_P: np.ndarray
    log_n_mean: float
    log_d_mean: float

    @classmethod
    def from_points(cls, num_params_P: np.ndarray, tokens_P: np.ndarray) -> Design:
        """Makes the design from N and D, which are not centred."""
        n_P, d_P = np.log(num_params_P), np.log(tokens_P)
        return cls(n_P - n_P.mean(), d_P - d_P.mean(), float(n_P.mean()), float(d_P.mean()))

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of the constants (K,)."""
        low, high = EXPONENTS
        return np.array([0.0, 0.0, 0.0, low, low]), np.array([np.inf, np.inf, np.inf, high, high])

    def to_law(self, constants_RK: np.ndarray) -> Law:
        """Converts centred constants (R, K) to a law for plain N and D."""
        e, a, b, alpha, beta = np.moveaxis(constants_RK, -1, 0)
        return Law(e, a * np.exp(alpha * self.log_n_mean), b * np.exp(beta * self.log_d_mean), alpha, beta)

    def to_constants(self, law: Law) -> np.ndarray:
        """Converts a law to centred constants; the inverse of `to_law`."""
        a = law.A * np.exp(-np.multiply(law.alpha, self.log_n_mean))
        b = law.B * np.exp(-np.multiply(law.beta, self.log_d_mean))
        return np.stack(np.broadcast_arrays(law.E, a, b, law.alpha, law.beta), -1)

    def predict(self, constants_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the losses (R, P), and their derivatives (R, P, K)."""
        e, a, b, alpha, beta = (column[..., None] for column in np.moveaxis(constants_RK, -1, 0))
        n_RP, d_RP = np.exp(-alpha * self.log_n_P), np.exp(-beta * self.log_d_P)
        # d/dE, d/da, d/db, d/dalpha, d/dbeta.
        slopes = (np.ones_like(n_RP), n_RP, d_RP, -a * n_RP * self.log_n_P, -b * d_RP * self.log_d_P)
        return e + a * n_RP + b * d_RP, np.stack(slopes, -1)

    def grid_cells(self, loss_P: np.ndarray, scale_P: np.ndarray) -> list[tuple[float, ...]]:
        """Returns the norm of the scaled errors, and the constants, for each pair of exponents on a grid."""
        exponents = np.geomspace(*EXPONENTS, _GRID)
        cells = []
        for alpha in exponents:
            n_P = np.exp(-alpha * self.log_n_P)
            for beta in exponents:
                columns_PK = np.stack([np.ones_like(n_P), n_P, np.exp(-beta * self.log_d_P)], -1)
                linear, norm = nnls(columns_PK * scale_P[:, None], loss_P * scale_P)
                cells.append((norm, *linear, alpha, beta))
        return cells


def fit_by_variable_projection(design: Design, loss_P: np.ndarray, weights_P: np.ndarray | None = None) -> np.ndarray:
    """Returns the constants (K,) of the law with the least sum of squared relative errors.

    For fixed exponents the law is linear, so non-negative least squares finds the best E, a, b >= 0. The exponents are
    searched on a grid, and `refine` starts from the best cells.
    """
    weights_P = np.ones_like(loss_P) if weights_P is None else weights_P
    # Rows are divided by the loss, because ordinary least squares on the scaled rows minimises relative errors.
    cells = design.grid_cells(loss_P, np.sqrt(weights_P) / loss_P)
    # Only every eighth of the best cells, because neighbours on the grid would be refined to the same minimum.
    best_RK = np.array(sorted(cells)[: 8 * _STARTS : 8])[:, 1:]
    shape = (len(best_RK), len(loss_P))
    fitted_RK, values_R = refine(
        design, np.broadcast_to(loss_P, shape), np.broadcast_to(weights_P, shape), best_RK, Objective()
    )
    return fitted_RK[np.argmin(values_R)]


class Predictor(Protocol):
    """Values of points as a function of constants."""

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of the constants (K,)."""
        ...

    def predict(self, constants_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the values (R, P), and their derivatives (R, P, K)."""
        ...


def refine(
    design: Predictor, loss_RP: np.ndarray, weights_RP: np.ndarray, start_RK: np.ndarray, objective: Objective
) -> tuple[np.ndarray, np.ndarray]:
    """Runs Levenberg-Marquardt from start constants, within the bounds, independently for every set.

    Returns:
        The constants (R, K) and the values of the objective (R,).
    """
    bounds = design.bounds
    constants_RK = np.clip(start_RK, *bounds)
    damping_R = np.full(len(constants_RK), 1e-3)
    values_R, normal_RKK, gradient_RK = _quadratic_model(design, loss_RP, weights_RP, constants_RK, objective)
    active_R = np.ones(len(constants_RK), bool)
    for _ in range(_ITERATIONS):
        # Finished sets are removed from the batch.
        rows = np.flatnonzero(active_R)
        if not len(rows):
            break
        step_RK = _damped_step(constants_RK[rows], normal_RKK[rows], gradient_RK[rows], damping_R[rows], bounds)
        # Clipping may make a step worse. The step is then rejected like any other step without gain.
        tried_RK = np.clip(constants_RK[rows] + step_RK, *bounds)
        new = _quadratic_model(design, loss_RP[rows], weights_RP[rows], tried_RK, objective)
        better_R = new[0] < values_R[rows]
        gain_R = (values_R[rows] - new[0]) / np.maximum(values_R[rows], 1e-300)
        change_R = (np.abs(tried_RK - constants_RK[rows]) / (np.abs(constants_RK[rows]) + 1e-6)).max(-1)
        accepted = rows[better_R]
        constants_RK[accepted] = tried_RK[better_R]
        values_R[accepted], normal_RKK[accepted], gradient_RK[accepted] = (part[better_R] for part in new)
        # After a step with gain, the next step is closer to Gauss-Newton. Otherwise it is closer to a short gradient
        # step.
        damping_R[rows] = np.clip(np.where(better_R, damping_R[rows] / 5, damping_R[rows] * 4), 1e-15, 1e12)
        small_R = better_R & (gain_R < _TOLERANCE) & (change_R < 1e-8)
        # A set is finished if a step changes little, if no step size gives a gain, or if the fit is perfect.
        active_R[rows] = ~(small_R | (~better_R & (damping_R[rows] > 1e8)) | (values_R[rows] < 1e-28))
    return constants_RK, values_R


def _quadratic_model(
    design: Predictor, loss_RP: np.ndarray, weights_RP: np.ndarray, constants_RK: np.ndarray, objective: Objective
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the objective (R,), its Gauss-Newton matrix J'WJ (R, K, K) and its gradient J'We (R, K)."""
    predicted_RP, slopes_RPK = design.predict(constants_RK)
    errors_RP, inner_RP = objective.residuals(predicted_RP, loss_RP)
    slopes_RPK = slopes_RPK * inner_RP[..., None]
    weighted_RPK = slopes_RPK * (weights_RP * objective.weights(errors_RP))[..., None]
    normal_RKK = np.swapaxes(weighted_RPK, -1, -2) @ slopes_RPK
    gradient_RK = (np.swapaxes(weighted_RPK, -1, -2) @ errors_RP[..., None])[..., 0]
    return objective.value(errors_RP, weights_RP), normal_RKK, gradient_RK


def _damped_step(
    constants_RK: np.ndarray,
    normal_RKK: np.ndarray,
    gradient_RK: np.ndarray,
    damping_R: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Computes the step (R, K) that solves (J'WJ + damping diag(J'WJ)) step = -gradient for the free constants."""
    # A constant at its bound whose step would go outwards is fixed: it gets the row and column of the identity.
    lower_K, upper_K = bounds
    fixed_RK = ((constants_RK <= lower_K) & (gradient_RK > 0)) | ((constants_RK >= upper_K) & (gradient_RK < 0))
    free_RK = ~fixed_RK
    diagonal_RK = np.einsum("rkk->rk", normal_RKK)
    matrix_RKK = normal_RKK * (free_RK[:, :, None] & free_RK[:, None, :])
    added_RK = damping_R[:, None] * diagonal_RK + 1e-300
    index = np.arange(constants_RK.shape[-1])
    matrix_RKK[:, index, index] = np.where(free_RK, diagonal_RK + added_RK, 1.0)
    # A constant without any effect, such as alpha if a = 0, has a zero row. A 1 on the diagonal keeps the matrix
    # regular.
    matrix_RKK[:, index, index] += np.where(matrix_RKK[:, index, index] > 1e-200, 0.0, 1.0)
    step_RK = np.linalg.solve(matrix_RKK, np.where(free_RK, -gradient_RK, 0.0)[..., None])[..., 0]
    return np.where(np.isfinite(step_RK), step_RK, 0.0)
