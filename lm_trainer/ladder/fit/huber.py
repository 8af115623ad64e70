"""Fits the law by minimising the Huber loss of the errors of log L with L-BFGS-B, as in the papers."""

from __future__ import annotations

from itertools import product

import numpy as np
from scipy.optimize import minimize
from scipy.special import huber

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.law import Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.repeats import RepeatDesign, RepeatLaw, make_design
from lm_trainer.ladder.fit.settings import DELTA
from lm_trainer.ladder.fit.solver import Objective, fit_by_variable_projection, refine

STARTS = {
    "hoffmann": [
        (a, b, alpha, beta, np.exp(e))
        for a, b, e, alpha, beta in product(
            (0, 5, 10, 15, 20, 25), (0, 5, 10, 15, 20, 25), (-1, 0, 1), (0.2, 0.6, 1.2), (0.2, 0.6, 1.2)
        )
    ],
    "olmo": [(3.0, 6.0, 0.1, 0.2, 1.0)],
}
"""Values of (log A, log B, alpha, beta, E) to start the search from: a grid as in Hoffmann et al. 2022 and Besiroglu et
al. 2024 (arXiv 2404.10102), or the single point of Bhagia et al. 2024 (arXiv 2412.04403)."""

_START_OF_REPEATS = 15.0
"""R* of Muennighoff et al. 2023 (arXiv 2305.16264)."""


def fit_huber(points: Points, start: str = "hoffmann") -> Law:
    """Returns the best law that L-BFGS-B finds from all starts, after a refinement.

    Raises:
        UserError: for an unknown start.
    """
    if start not in STARTS:
        raise UserError(f"--start {start}: there are {', '.join(STARTS)}")
    # As in the papers, x is (log A, log B, alpha, beta, E).
    log_n, log_d, log_loss = np.log(points.num_params), np.log(points.tokens), np.log(points.loss)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        # Computed in logarithms, because the terms of the law overflow a float far from the points.
        log_from_n, log_from_d = x[0] - x[2] * log_n, x[1] - x[3] * log_d
        log_predicted = np.logaddexp(np.logaddexp(log_from_n, log_from_d), np.log(max(x[4], 1e-300)))
        error = log_predicted - log_loss
        # Quadratic near zero and linear beyond, to limit the influence of single bad runs.
        value, slope = huber(DELTA, error).sum(), np.clip(error, -DELTA, DELTA)
        # The derivative of log L with respect to the logarithm of a term is the share of the term in L.
        n, d = slope * np.exp(log_from_n - log_predicted), slope * np.exp(log_from_d - log_predicted)
        return value, np.array([n.sum(), d.sum(), -n @ log_n, -d @ log_d, (slope * np.exp(-log_predicted)).sum()])

    # Only the eight best starts of the grid, because the others lead to the same minima.
    starts = sorted(STARTS[start], key=lambda x: objective(np.array(x))[0])[:8]
    # scipy's tolerance is absolute, but the objective is only about 1e-5, so the result is refined.
    options = {"maxiter": 200, "ftol": 1e-13, "gtol": 1e-9}
    optima = [
        minimize(objective, x, jac=True, method="L-BFGS-B", bounds=[(0, None)] * 5, options=options).x for x in starts
    ]
    log_a, log_b, alpha, beta, e = np.array(optima).T
    design = make_design(points)
    laws = Law(e, np.exp(log_a), np.exp(log_b), alpha, beta)
    if isinstance(design, RepeatDesign):
        # The papers' search has no R*, so the refinement starts from the least squares of all constants as well.
        laws = RepeatLaw(**vars(laws), repeats=np.full(len(optima), _START_OF_REPEATS))
    start_RK = design.to_constants(laws)
    if isinstance(design, RepeatDesign):
        start_RK = np.append(start_RK, fit_by_variable_projection(design, points.loss)[None], 0)
    loss_RP = np.broadcast_to(points.loss, (len(start_RK), len(points)))
    fitted_RK, values_R = refine(design, loss_RP, np.ones_like(loss_RP), start_RK, Objective(DELTA))
    return design.to_law(fitted_RK[np.argmin(values_R)])
