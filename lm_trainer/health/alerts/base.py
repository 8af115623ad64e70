"""Base class of the alert kinds, and statistics that they share."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lm_trainer.core.config import Config

Check = Callable[[Mapping[str, float]], str | None]
"""Function that receives the number of each step and its logged metrics, by name, and returns the message of an alert
or None."""

LOSS, GRAD_NORM = "train/loss", "optim/grad_norm"
STEP_TIME, DATA_WAIT = "throughput/step_time", "throughput/data_wait"
EXPERT_OVERLOAD, UNUSED_EXPERTS = "train/router_batch_overload", "train/router_unused_experts"
"""Metric names. Throughput metrics are missing at steps whose time was not measured separately."""
STEP = "step"
"""Name under which a check receives the number of the step, counted from 1."""

_NORMAL_MAD = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution (Leys et al. 2013)."""
_MIN_SPREAD = 1e-3
"""Minimum spread as a fraction of the median, so that nearly constant values do not trigger alerts."""


class Alert(NamedTuple):
    """An alert to send."""

    step: int
    kind: str
    message: str
    metrics: Mapping[str, float]
    """Metrics of the step; empty if unknown."""


class AlertKind(Config):
    """A kind of alert and its settings.

    To add a kind, define a subclass in a new file and add a field to `AlertsConfig`.
    """

    @abstractmethod
    def build_check(self) -> Check:
        """Returns a new check with its own state, to be called once after each step."""


class RobustWindow:
    """Median and spread of the last values. They are robust against single outliers.

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
        """Returns the robust z-score (value - median) / (1.4826 MAD) of a value; None if the window has too few values.

        Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993.
        """
        if len(self._values) < self._min_count:
            return None
        median = self.median
        spread = _NORMAL_MAD * statistics.median(abs(v - median) for v in self._values)
        return (value - median) / max(spread, _MIN_SPREAD * abs(median), 1e-12)

    def add(self, value: float) -> None:
        """Adds a value to the window. Non-finite values are ignored."""
        if math.isfinite(value):
            self._values.append(value)
