"""Fewer points of a curve that look the same.

Shape letters: N points, B buckets.
"""

from __future__ import annotations

import numpy as np


def downsample(x_N: np.ndarray, y_N: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the lowest and the highest point of each of many equal pieces, the first point and the last.

    No extreme is lost: a spike of a single step stays as high as it was.

    Args:
        x_N: rising.
        y_N: the values; those that are not finite are left out.
        most: points to keep, about.
    """
    there = np.isfinite(y_N)
    x_N, y_N = x_N[there], y_N[there]
    if len(x_N) <= most:
        return x_N, y_N
    buckets = max(most // 2, 1)
    size = -(-len(y_N) // buckets)
    # Filled up by its last value, which is no new extreme.
    padded = np.concatenate([y_N, np.full(-len(y_N) % size, y_N[-1])]).reshape(-1, size)
    starts_B = np.arange(len(padded)) * size
    chosen = np.concatenate([[0], starts_B + padded.argmin(1), starts_B + padded.argmax(1), [len(y_N) - 1]])
    kept = np.unique(np.minimum(chosen, len(y_N) - 1))
    return x_N[kept], y_N[kept]
