"""Reduces the points of a curve without visible change.

Shape letters: N points, B buckets.
"""

from __future__ import annotations

import numpy as np


def downsample(x_N: np.ndarray, y_N: np.ndarray, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the minimum and maximum of each of many equal buckets, and the first and last point.

    No extreme is lost: a spike of a single step keeps its height.

    Args:
        x_N: increasing x values.
        y_N: values; non-finite ones are dropped.
        max_points: approximate number of points to keep.
    """
    is_finite = np.isfinite(y_N)
    x_N, y_N = x_N[is_finite], y_N[is_finite]
    if len(x_N) <= max_points:
        return x_N, y_N
    buckets = max(max_points // 2, 1)
    size = -(-len(y_N) // buckets)
    # Padded with the last value, which adds no extreme.
    padded = np.concatenate([y_N, np.full(-len(y_N) % size, y_N[-1])]).reshape(-1, size)
    starts_B = np.arange(len(padded)) * size
    chosen = np.concatenate([[0], starts_B + padded.argmin(1), starts_B + padded.argmax(1), [len(y_N) - 1]])
    selected = np.unique(np.minimum(chosen, len(y_N) - 1))
    return x_N[selected], y_N[selected]
