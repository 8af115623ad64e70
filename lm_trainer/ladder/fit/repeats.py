"""The law for text that is read more than once (Muennighoff et al. 2023, arXiv 2305.16264).

D tokens of a text with U distinct tokens are worth D' = U (1 + R* (1 - exp(-R / R*))) new tokens. R = D / U - 1 is the
number of repetitions, and L = E + A / N^alpha + B / D'^beta. The paper also discounts parameters beyond the best number
for U tokens; this form does not.

Dimensions: R sets of losses or weights, P points, K the constants of `Design` and log R*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_trainer.ladder.fit.law import FLOPS_PER_PARAM, Law
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.solver import Design

REPEATS = (0.1, 1000.0)
"""Bounds of R*. The paper has 15."""
_STARTS = tuple(np.geomspace(0.5, 300, 8))
"""Values of R* at which the search over the exponents is made."""
_REACH = 30.0
"""Half the width of the initial interval of the bisection for the best N, in log N."""
_HALVINGS = 60


def effective_tokens(tokens: Any, unique_tokens: Any, repeats: Any) -> Any:
    """Computes D', the number of new tokens that `tokens` with `unique_tokens` distinct ones are worth."""
    distinct = np.minimum(tokens, unique_tokens)
    return distinct * (1 - repeats * np.expm1(-(tokens / distinct - 1) / repeats))


@dataclass(frozen=True)
class RepeatLaw(Law):
    """Constants of the law for repeated text."""

    repeats: Any
    """R*: the number of repetitions after which a further one is worth 1/e of new text."""

    def loss(self, num_params: Any, tokens: Any, unique_tokens: Any = None) -> Any:
        if unique_tokens is None:
            return super().loss(num_params, tokens)
        return super().loss(num_params, effective_tokens(tokens, unique_tokens, self.repeats))

    def optimum(self, flops: Any, unique_tokens: Any = None) -> tuple[Any, Any]:
        fresh, tokens = super().optimum(flops)
        if unique_tokens is None:
            return fresh, tokens
        # L is convex in log N at a constant compute, so the zero of its slope is found by bisection.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            low, high = np.log(fresh) - _REACH, np.log(fresh) + _REACH
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                falls = self._slope(np.exp(middle), flops, unique_tokens) < 0
                low, high = np.where(falls, middle, low), np.where(falls, high, middle)
            num_params = np.exp((low + high) / 2)
        return num_params, flops / (FLOPS_PER_PARAM * num_params)

    def _slope(self, num_params: Any, flops: Any, unique_tokens: Any) -> Any:
        """Computes dL / d log N at a constant compute."""
        tokens = flops / (FLOPS_PER_PARAM * num_params)
        distinct = np.minimum(tokens, unique_tokens)
        worth = effective_tokens(tokens, unique_tokens, self.repeats)
        # d log D' / d log D: dD'/dD is exp(-R / R*).
        share = tokens / worth * np.exp(-(tokens / distinct - 1) / self.repeats)
        of_size = self.alpha * self.A * np.power(num_params, -self.alpha)
        return self.beta * self.B * share * np.power(worth, -self.beta) - of_size


@dataclass(frozen=True)
class RepeatDesign(Design):
    """The design of points with repeated text. Its constants are the constants of `Design`, and log R*."""

    tokens_P: np.ndarray
    unique_P: np.ndarray

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        low_K, high_K = super().bounds
        return np.append(low_K, np.log(REPEATS[0])), np.append(high_K, np.log(REPEATS[1]))

    def to_law(self, constants_RK: np.ndarray) -> RepeatLaw:
        law = super().to_law(constants_RK[..., :5])
        return RepeatLaw(**vars(law), repeats=np.exp(constants_RK[..., 5]))

    def to_constants(self, law: Law) -> np.ndarray:
        assert isinstance(law, RepeatLaw)
        return np.concatenate([super().to_constants(law), np.log(law.repeats)[..., None]], -1)

    def predict(self, constants_RK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e, a, b, alpha, beta, log_repeats = (column[..., None] for column in np.moveaxis(constants_RK, -1, 0))
        repeats = np.exp(log_repeats)
        worth_RP = effective_tokens(self.tokens_P, self.unique_P, repeats)
        log_d_RP = np.log(worth_RP) - self.log_d_mean
        n_RP, d_RP = np.exp(-alpha * self.log_n_P), np.exp(-beta * log_d_RP)
        # d log D' / d log R* = U R* (1 - exp(-x) - x exp(-x)) / D' with x = R / R*.
        distinct_P = np.minimum(self.tokens_P, self.unique_P)
        x_RP = (self.tokens_P / distinct_P - 1) / repeats
        share_RP = distinct_P * repeats * (1 - (1 + x_RP) * np.exp(-x_RP)) / worth_RP
        slopes = (
            *(np.ones_like(d_RP), np.broadcast_to(n_RP, d_RP.shape), d_RP),
            *(-a * n_RP * self.log_n_P, -b * d_RP * log_d_RP, -b * beta * d_RP * share_RP),
        )
        return e + a * n_RP + b * d_RP, np.stack(np.broadcast_arrays(*slopes), -1)

    def grid_cells(self, loss_P: np.ndarray, scale_P: np.ndarray) -> list[tuple[float, ...]]:
        cells = []
        for repeats in _STARTS:
            worth_P = effective_tokens(self.tokens_P, self.unique_P, repeats)
            fixed = Design(self.log_n_P, np.log(worth_P) - self.log_d_mean, self.log_n_mean, self.log_d_mean)
            cells += [(*cell, float(np.log(repeats))) for cell in fixed.grid_cells(loss_P, scale_P)]
        return cells


def make_design(points: Points) -> Design:
    """Makes the design of the points: for repeated text if they say how many of their tokens are distinct."""
    design = Design.from_points(points.num_params, points.tokens)
    if points.unique_tokens is None:
        return design
    return RepeatDesign(**vars(design), tokens_P=points.tokens, unique_P=points.unique_tokens)
