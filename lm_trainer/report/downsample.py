"""Reduces the number of points of a curve without a visible change.

Shape letters: N is the number of points, B the number of buckets.
"""

from __future__ import annotations

import numpy as np


def downsample(x_N: np.ndarray, y_N: np.ndarray, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the minimum and the maximum of each of many buckets of equal size, and the first and the last point.

    No extreme value is lost: a spike of a single step keeps its height.

    Args:
        x_N: x values in ascending order.
        y_N: y values. Points with a non-finite value are dropped.
        max_points: approximate number of points to keep.
    """
    is_finite = np.isfinite(y_N)
    x_N, y_N = x_N[is_finite], y_N[is_finite]
    if len(x_N) <= max_points:
        return x_N, y_N
    buckets = max(max_points // 2, 1)
    size = -(-len(y_N) // buckets)
    # Pads the last bucket with the last value, which adds no new extreme value.
    padded = np.concatenate([y_N, np.full(-len(y_N) % size, y_N[-1])]).reshape(-1, size)
    starts_B = np.arange(len(padded)) * size
    chosen = np.concatenate([[0], starts_B + padded.argmin(1), starts_B + padded.argmax(1), [len(y_N) - 1]])
    selected = np.unique(np.minimum(chosen, len(y_N) - 1))
    return x_N[selected], y_N[selected]
