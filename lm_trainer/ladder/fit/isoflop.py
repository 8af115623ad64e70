"""Approach 2 of Hoffmann et al. 2022 (arXiv 2203.15556): a parabola per compute budget, and a power law through the
minima.

The approach is biased if the sizes at a compute budget are far apart (arXiv 2603.22339), because the law is not a
parabola in log N, and not symmetric around its minimum. It is implemented for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_trainer.ladder.fit.points import Points

_SAME_COMPUTE = 0.1
"""Maximum relative difference between the compute of points in one group."""
_FEWEST_SIZES = 3
"""Minimum number of sizes for a parabola."""


@dataclass(frozen=True)
class Valley:
    """Points with about the same compute."""

    flops: float
    indices: tuple[int, ...]
    parabola: tuple[float, ...]
    """Coefficients of the loss as a polynomial in log N, highest power first."""
    num_params: float
    """N at the minimum of the parabola."""


@dataclass(frozen=True)
class IsoFlop:
    """The power law N = scale * C^exponent."""

    valleys: tuple[Valley, ...]
    exponent: float
    scale: float

    def num_params(self, flops: float) -> float:
        """Returns the best N for a compute budget in FLOPs."""
        return self.scale * flops**self.exponent


def fit_isoflop(points: Points) -> IsoFlop | None:
    """Fits the power law. Returns None unless two compute budgets (6 N D) have three sizes each and a minimum.

    Points belong to the same budget if their compute differs by at most a tenth.
    """
    valleys = []
    # In ascending order, each remaining point starts a group with all points that have up to 10 % more compute.
    left = np.argsort(points.flops)
    while len(left):
        near = points.flops[left] <= points.flops[left[0]] * (1 + _SAME_COMPUTE)
        chosen, left = left[near], left[~near]
        if len(np.unique(points.num_params[chosen])) < _FEWEST_SIZES:
            continue
        log_n = np.log(points.num_params[chosen])
        # Centred, because log N is about 20, and squaring it would lose precision of the slope.
        middle = log_n.mean()
        square, slope, level = np.polyfit(log_n - middle, points.loss[chosen], 2)
        # A parabola that opens downwards has no minimum.
        if square > 0:
            lowest = middle - slope / (2 * square)
            flops = float(np.exp(np.log(points.flops[chosen]).mean()))
            # The same parabola as a function of log N itself: a (x - m)^2 + b (x - m) + c, multiplied out.
            shifted = (square, slope - 2 * square * middle, level - slope * middle + square * middle**2)
            indices = tuple(int(i) for i in chosen)
            valleys.append(Valley(flops, indices, shifted, float(np.exp(lowest))))
    if len(valleys) < 2:
        return None
    # A line through the minima: log N = exponent log C + offset.
    exponent, offset = np.polyfit(
        np.log([valley.flops for valley in valleys]), np.log([valley.num_params for valley in valleys]), 1
    )
    return IsoFlop(tuple(valleys), float(exponent), float(np.exp(offset)))
