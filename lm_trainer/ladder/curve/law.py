"""The law of loss curves and its fit.

L(s, N) = L0 + A / S1(s)^alpha + B / N^beta - C S2(s) / N^gamma, with the forward area S1 and the annealing area S2 of
the learning rate up to step s: equation 1 of Tissue et al. 2024 (arXiv 2408.11029) with terms of the size. At a
constant learning rate S1 is the number of tokens, and this is equation 2 of Hoffmann et al. 2022 (arXiv 2203.15556).

Shape letters: W is the number of windows of all curves, K the number of constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from lm_trainer.ladder.curve.areas import RatePlan, Windows

EXPONENT_RANGES = {"alpha": (0.02, 2.0), "beta": (0.02, 2.0), "gamma": (-1.0, 1.0)}
_LOWER = (0.0, 0.0, 0.0, 0.0, *(low for low, _ in EXPONENT_RANGES.values()))
_UPPER = (np.inf, np.inf, np.inf, np.inf, *(high for _, high in EXPONENT_RANGES.values()))
_ALPHAS = _BETAS = np.geomspace(0.05, 1.5, 7)
_GAMMAS = (-0.5, 0.0, 0.5)
_STARTS = 4
"""Number of cells of the grid from which the fit is refined."""
_SHORTEST = 1.0
"""Shortest horizon, in steps, at which annealing is forgotten at once."""
_RATIOS = (1.4, 1.1, 1.02)
"""Ratios between neighbouring horizons in the successive refinements of a fit."""


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
        self._pairs = list(zip(plans, windows, strict=True))
        self._annealed = any(plan.annealed for plan in plans)
        # From annealing that is forgotten at once to annealing that is never forgotten.
        self._horizons = _SHORTEST, 2.0 * max(plan.steps for plan in plans)
        self._areas: dict[float, tuple[np.ndarray, float]] = {}
        log_size_W = np.concatenate([np.full(len(w.last_W), np.log(plan.num_params)) for plan, w in self._pairs])
        log_forward_W = np.log(np.concatenate([w.mean(plan.forward_area()) for plan, w in self._pairs]))
        self._mean_size, self._mean_forward = float(log_size_W.mean()), float(log_forward_W.mean())
        self._size_W, self._forward_W = log_size_W - self._mean_size, log_forward_W - self._mean_forward

    def fit(self, loss_W: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the centred constants (7,) and the horizon with the least sum of squared relative errors.

        For fixed exponents and a fixed horizon the law is linear, so non-negative least squares finds the best L0, A, B
        and C. The others are searched on a grid, and the best cells refined.
        """
        horizons = np.geomspace(*self._horizons, 8) if self._annealed else self._horizons[:1]
        gammas = _GAMMAS if self._annealed else (0.0,)
        cells = []
        for alpha, beta, gamma, horizon in product(_ALPHAS, _BETAS, gammas, map(float, horizons)):
            columns_WK = self._columns(alpha, beta, gamma, horizon)
            linear, norm = nnls(columns_WK / loss_W[:, None], np.ones_like(loss_W))
            cells.append((norm, horizon, np.array([*linear, alpha, beta, gamma])))
        cells.sort(key=lambda cell: cell[0])
        # Every fourth of the best cells, because neighbours on the grid lead to the same minimum.
        starts = [(start, horizon) for _, horizon, start in cells[: 4 * _STARTS : 4]]
        for ratio in _RATIOS:
            fits = [self.refine_horizon(loss_W, start, horizon, ratio) for start, horizon in starts]
            constants_K, horizon, _ = min(fits, key=lambda result: result[2])
            starts = [(constants_K, horizon)]
        return starts[0]

    def refine_horizon(
        self, loss_W: np.ndarray, start_K: np.ndarray, horizon: float, ratio: float
    ) -> tuple[np.ndarray, float, float]:
        """Returns the constants (7,), the horizon and the objective at the nearest minimum, among horizons that are a
        power of `ratio` apart.
        """
        constants_K, value = self.refine(loss_W, start_K, horizon)
        while self._annealed:
            tried = [
                (*self.refine(loss_W, constants_K, longer), longer)
                for longer in (horizon / ratio, horizon * ratio)
                if self._horizons[0] <= longer <= self._horizons[1]
            ]
            better_K, lower, longer = min(tried, key=lambda result: result[1])
            if lower >= value:
                break
            constants_K, value, horizon = better_K, lower, longer
        return constants_K, horizon, value

    def refine(self, loss_W: np.ndarray, start_K: np.ndarray, horizon: float) -> tuple[np.ndarray, float]:
        """Returns the constants (7,) at the minimum that the start leads to, and the objective."""

        def errors(constants_K: np.ndarray) -> np.ndarray:
            return self.predict(constants_K, horizon) / loss_W - 1

        def slopes(constants_K: np.ndarray) -> np.ndarray:
            return self._slopes(constants_K, horizon) / loss_W[:, None]

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

    def predict(self, constants_K: np.ndarray, horizon: float) -> np.ndarray:
        """Computes the losses of the windows (W,)."""
        alpha, beta, gamma = constants_K[4:]
        return self._columns(alpha, beta, gamma, horizon) @ constants_K[:4]

    def _slopes(self, constants_K: np.ndarray, horizon: float) -> np.ndarray:
        """Computes the derivatives of the losses with respect to the constants (W, 7)."""
        _, a, b, c, alpha, beta, gamma = constants_K
        columns_WK = self._columns(alpha, beta, gamma, horizon)
        of_exponents = (
            -a * columns_WK[:, 1] * self._forward_W,
            -b * columns_WK[:, 2] * self._size_W,
            -c * columns_WK[:, 3] * self._size_W,
        )
        return np.column_stack([columns_WK, *of_exponents])

    def to_law(self, constants_K: np.ndarray, horizon: float) -> CurveLaw:
        """Converts centred constants to a law for plain N, S1 and S2."""
        e, a, b, c, alpha, beta, gamma = map(float, constants_K)
        return CurveLaw(
            e,
            a * float(np.exp(alpha * self._mean_forward)),
            b * float(np.exp(beta * self._mean_size)),
            c * float(np.exp(gamma * self._mean_size)) / self._annealing(horizon)[1],
            alpha,
            beta,
            gamma,
            horizon,
        )

    def _columns(self, alpha: Any, beta: Any, gamma: Any, horizon: float) -> np.ndarray:
        """Returns the terms whose sum is the loss, with factors of 1 (W, 4)."""
        annealed_W = -np.exp(-gamma * self._size_W) * self._annealing(horizon)[0]
        return np.stack(
            [np.ones_like(self._size_W), np.exp(-alpha * self._forward_W), np.exp(-beta * self._size_W), annealed_W], -1
        )

    def _annealing(self, horizon: float) -> tuple[np.ndarray, float]:
        """Returns the annealing areas divided by the largest one (W,), so that C has the unit of the loss, and this
        largest area.
        """
        if horizon not in self._areas:
            area_W = np.concatenate([w.mean(plan.annealing_area(horizon)) for plan, w in self._pairs])
            scale = max(float(np.abs(area_W).max()), 1e-12)
            self._areas[horizon] = area_W / scale, scale
        return self._areas[horizon]
