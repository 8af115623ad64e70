"""Base class of alert kinds, and shared statistics."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lm_trainer.core.config import Config

Check = Callable[[Mapping[str, float]], str | None]
"""Called with the logged metrics of each step, by name; returns a message to alert, or None."""

LOSS, GRAD_NORM = "train/loss", "optim/grad_norm"
STEP_TIME, DATA_WAIT = "throughput/step_time", "throughput/data_wait"
"""Metric names; throughput metrics are absent at steps without a separate time measurement."""

_NORMAL_MAD = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution (Leys et al. 2013)."""
_MIN_SPREAD = 1e-3
"""Minimum spread as a fraction of the median: nearly constant values must not trigger alerts."""


class Alert(NamedTuple):
    """An alert to send."""

    step: int
    kind: str
    message: str
    metrics: Mapping[str, float]
    """Metrics of the step; empty if unknown."""


class AlertKind(Config):
    """A kind of alert and its settings. To add one: a file with a subclass, and a field in `AlertsConfig`."""

    @abstractmethod
    def build_check(self) -> Check:
        """Returns a new check with separate state; it is called once after each step."""


class RobustWindow:
    """Median and spread of the last values; robust against single outliers.

    Args:
        size: number of values in the window.
        min_count: minimum number of values for a score.
    """

    def __init__(self, size: int, min_count: int):
        self._values: deque[float] = deque(maxlen=size)
        self._min_count = min_count

    @property
    def median(self) -> float:
        return statistics.median(self._values)

    def z_score(self, value: float) -> float | None:
        """Robust z-score against the previous values: (value - median) / (1.4826 MAD). None if they are too few.

        Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993.
        """
        if len(self._values) < self._min_count:
            return None
        median = self.median
        spread = _NORMAL_MAD * statistics.median(abs(v - median) for v in self._values)
        return (value - median) / max(spread, _MIN_SPREAD * abs(median), 1e-12)

    def add(self, value: float) -> None:
        """Adds a value to the window; non-finite values are ignored."""
        if math.isfinite(value):
            self._values.append(value)
