"""Approach 2 of Hoffmann et al. 2022 (arXiv 2203.15556): a parabola for each compute, a power law through their minima.

It is biased if the sizes at a compute are far apart (arXiv 2603.22339): the law is not a parabola in log N, and its two
sides are not symmetric. It is implemented for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_trainer.ladder.fit.points import Points

_SAME_COMPUTE = 0.1
"""Largest relative difference between computes of one group."""
_FEWEST_SIZES = 3
"""Minimum number of sizes for a parabola."""


@dataclass(frozen=True)
class Valley:
    """Points of about the same compute."""

    flops: float
    indices: tuple[int, ...]
    parabola: tuple[float, ...]
    """Coefficients of the loss over log N, highest power first."""
    num_params: float
    """N at the minimum."""


@dataclass(frozen=True)
class IsoFlop:
    """N = scale * C^exponent."""

    valleys: tuple[Valley, ...]
    exponent: float
    scale: float

    def num_params(self, flops: float) -> float:
        """The best N for a compute in FLOPs."""
        return self.scale * flops**self.exponent


def fit_isoflop(points: Points) -> IsoFlop | None:
    """Fits the power law; None without two computes (6 N D, within a tenth) with three sizes each and a minimum."""
    valleys = []
    # In ascending order, each remaining compute collects the ones up to a tenth above it.
    left = np.argsort(points.flops)
    while len(left):
        near = points.flops[left] <= points.flops[left[0]] * (1 + _SAME_COMPUTE)
        chosen, left = left[near], left[~near]
        if len(np.unique(points.num_params[chosen])) < _FEWEST_SIZES:
            continue
        log_n = np.log(points.num_params[chosen])
        # Centred: log N is about 20, and squaring it would cost digits of the slope.
        middle = log_n.mean()
        square, slope, level = np.polyfit(log_n - middle, points.loss[chosen], 2)
        # A parabola that opens downwards has no minimum.
        if square > 0:
            lowest = middle - slope / (2 * square)
            flops = float(np.exp(np.log(points.flops[chosen]).mean()))
            # The same parabola over log N itself: a (x - m)^2 + b (x - m) + c, multiplied out.
            shifted = (square, slope - 2 * square * middle, level - slope * middle + square * middle**2)
            indices = tuple(int(i) for i in chosen)
            valleys.append(Valley(flops, indices, shifted, float(np.exp(lowest))))
    if len(valleys) < 2:
        return None
    # log N = exponent log C + offset through the minima.
    exponent, offset = np.polyfit(
        np.log([valley.flops for valley in valleys]), np.log([valley.num_params for valley in valleys]), 1
    )
    return IsoFlop(tuple(valleys), float(exponent), float(np.exp(offset)))
