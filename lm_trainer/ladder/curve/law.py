"""The law of loss curves and its fit.

L(s, N) = L0 + A / S1(s)^alpha + B / N^beta - C S2(s) / N^gamma, with the forward area S1 and the annealing area S2 of
the learning rate up to step s: equation 1 of Tissue et al. 2024 (arXiv 2408.11029) with terms of the size. At a constant
learning rate S1 is the number of tokens, and this is equation 2 of Hoffmann et al. 2022 (arXiv 2203.15556).

Shape letters: W is the number of windows of all curves, H the number of horizons, K the number of constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from lm_trainer.ladder.curve.areas import RatePlan, Windows

_LOWER = (0.0, 0.0, 0.0, 0.0, 0.02, 0.02, -1.0)
_UPPER = (np.inf, np.inf, np.inf, np.inf, 2.0, 2.0, 1.0)
_ALPHAS = _BETAS = np.geomspace(0.05, 1.5, 7)
_GAMMAS = (-0.5, 0.0, 0.5)
_STARTS = 4
"""Number of cells of the grid from which the fit is refined."""


@dataclass(frozen=True)
class CurveLaw:
    """Constants of the law."""

    L0: float
    A: float
    B: float
    C: float
    alpha: float
    beta: float
    gamma: float
    horizon: float
    """Number of steps 1 / (1 - lambda) over which the momentum of the annealing fades."""

    def loss(self, plan: RatePlan, windows: Windows) -> np.ndarray:
        """Computes the mean loss of each window of a run (W,), in the unit of the fitted losses."""
        forward_W = windows.mean(plan.forward_area())
        annealed_W = windows.mean(plan.annealing_area(self.horizon))
        size = float(plan.num_params)
        return (
            self.L0
            + self.A * forward_W**-self.alpha
            + self.B * size**-self.beta
            - self.C * size**-self.gamma * annealed_W
        )

    def as_dict(self) -> dict[str, float]:
        """Returns the constants as plain data."""
        return asdict(self)


CONSTANTS = tuple(field.name for field in fields(CurveLaw))


class CurveDesign:
    """Areas of the windows of several curves, centred in log N and log S1 to separate the constants.

    Args:
        plans: schedule of each curve.
        windows: windows of each curve.
    """

    def __init__(self, plans: Sequence[RatePlan], windows: Sequence[Windows]):
        longest = max(plan.steps for plan in plans)
        self.annealed = any(plan.annealed for plan in plans)
        # From annealing that is forgotten at once to annealing that is never forgotten.
        self.horizons_H = np.geomspace(2.0, 2.0 * longest, 24)
        log_size_W = np.concatenate(
            [np.full(len(w.last_W), np.log(plan.num_params)) for plan, w in zip(plans, windows, strict=True)]
        )
        log_forward_W = np.log(
            np.concatenate([w.mean(plan.forward_area()) for plan, w in zip(plans, windows, strict=True)])
        )
        self._annealed_HW = np.stack(
            [
                np.concatenate([w.mean(plan.annealing_area(h)) for plan, w in zip(plans, windows, strict=True)])
                for h in self.horizons_H
            ]
        )
        # Divided by the largest value, so that C has the unit of the loss.
        self._scales_H = np.maximum(np.abs(self._annealed_HW).max(-1), 1e-12)
        self.mean_size, self.mean_forward = float(log_size_W.mean()), float(log_forward_W.mean())
        self.size_W, self.forward_W = log_size_W - self.mean_size, log_forward_W - self.mean_forward

    def fit(self, loss_W: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns the centred constants (7,) and the index of the horizon with the least sum of squared relative
        errors.

        For fixed exponents and a fixed horizon the law is linear, so non-negative least squares finds the best L0, A, B
        and C. The others are searched on a grid, and the best cells refined.
        """
        cells = []
        horizons = range(0, len(self.horizons_H), 3) if self.annealed else (0,)
        for alpha, beta, gamma, index in product(_ALPHAS, _BETAS, _GAMMAS if self.annealed else (0.0,), horizons):
            columns_WK = self._columns(alpha, beta, gamma, index)
            linear, norm = nnls(columns_WK / loss_W[:, None], np.ones_like(loss_W))
            cells.append((norm, index, np.array([*linear, alpha, beta, gamma])))
        cells.sort(key=lambda cell: cell[0])
        # Every fourth of the best cells, because neighbours on the grid lead to the same minimum.
        fits = [self.refine_horizon(loss_W, start, index) for _, index, start in cells[: 4 * _STARTS : 4]]
        constants_K, index, _ = min(fits, key=lambda result: result[2])
        return constants_K, index

    def refine_horizon(self, loss_W: np.ndarray, start_K: np.ndarray, index: int) -> tuple[np.ndarray, int, float]:
        """Returns the constants (7,), the index of the horizon and the objective at the nearest minimum."""
        best = (*self.refine(loss_W, start_K, index), index)
        # Neighbours of the horizon are tried until none is better.
        while self.annealed:
            neighbours = [i for i in (best[2] - 1, best[2] + 1) if 0 <= i < len(self.horizons_H)]
            tried = [(*self.refine(loss_W, best[0], i), i) for i in neighbours]
            better = min(tried, key=lambda result: result[1])
            if better[1] >= best[1]:
                break
            best = better
        return best[0], best[2], best[1]

    def refine(self, loss_W: np.ndarray, start_K: np.ndarray, index: int) -> tuple[np.ndarray, float]:
        """Returns the constants (7,) at the minimum that the start leads to, and the objective."""

        def errors(constants_K: np.ndarray) -> np.ndarray:
            return self.predict(constants_K, index) / loss_W - 1

        def slopes(constants_K: np.ndarray) -> np.ndarray:
            return self._slopes(constants_K, index) / loss_W[:, None]

        start_K = np.clip(start_K, np.array(_LOWER) + 1e-9, _UPPER)
        result = least_squares(
            errors,
            start_K,
            jac=slopes,  # pyright: ignore[reportArgumentType] - the stubs know names alone
            bounds=(_LOWER, _UPPER),
            x_scale="jac",
            ftol=1e-10,
            xtol=1e-9,
            max_nfev=200,
        )
        return result.x, float(result.cost)

    def predict(self, constants_K: np.ndarray, index: int) -> np.ndarray:
        """Computes the losses of the windows (W,)."""
        alpha, beta, gamma = constants_K[4:]
        return self._columns(alpha, beta, gamma, index) @ constants_K[:4]

    def _slopes(self, constants_K: np.ndarray, index: int) -> np.ndarray:
        """Computes the derivatives of the losses with respect to the constants (W, 7)."""
        _, a, b, c, alpha, beta, gamma = constants_K
        columns_WK = self._columns(alpha, beta, gamma, index)
        of_exponents = (
            -a * columns_WK[:, 1] * self.forward_W,
            -b * columns_WK[:, 2] * self.size_W,
            -c * columns_WK[:, 3] * self.size_W,
        )
        return np.column_stack([columns_WK, *of_exponents])

    def to_law(self, constants_K: np.ndarray, index: int) -> CurveLaw:
        """Converts centred constants to a law for plain N, S1 and S2."""
        e, a, b, c, alpha, beta, gamma = map(float, constants_K)
        return CurveLaw(
            e,
            a * float(np.exp(alpha * self.mean_forward)),
            b * float(np.exp(beta * self.mean_size)),
            c * float(np.exp(gamma * self.mean_size)) / float(self._scales_H[index]),
            alpha,
            beta,
            gamma,
            float(self.horizons_H[index]),
        )

    def _columns(self, alpha: Any, beta: Any, gamma: Any, index: int) -> np.ndarray:
        """Returns the terms whose sum is the loss, with factors of 1 (W, 4)."""
        annealed_W = -np.exp(-gamma * self.size_W) * self._annealed_HW[index] / self._scales_H[index]
        return np.stack(
            [np.ones_like(self.size_W), np.exp(-alpha * self.forward_W), np.exp(-beta * self.size_W), annealed_W], -1
        )
