"""The contract of an alert's kind, and the statistics that several of them share."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lm_trainer.core.config import Config

Check = Callable[[Mapping[str, float]], str | None]
"""Takes the metrics of each step in turn, by the names that they are logged under; returns a message to alert."""

LOSS, GRAD_NORM = "train/loss", "optim/grad_norm"
STEP_TIME, DATA_WAIT = "throughput/step_time", "throughput/data_wait"
"""Names of metrics; those of throughput are absent at steps that have no time of their own."""

_NORMAL_MAD = 1.4826
"""Standard deviations of a normal distribution for each median absolute deviation (Leys et al. 2013)."""
_LEAST_SPREAD = 1e-3
"""Share of the median that counts as spread at least: values that hardly differ are no basis for an alert."""


class Alert(NamedTuple):
    """One alert, as it is sent."""

    step: int
    kind: str
    message: str
    metrics: Mapping[str, float]
    """Metrics of the step; empty where none is known."""


class AlertKind(Config):
    """A kind of alert and its settings. To add one: a file with a subclass, and a field in `AlertsConfig`."""

    @abstractmethod
    def open(self) -> Check:
        """Returns a check with a state of its own; it is called once after each step."""


class RobustWindow:
    """The median and spread of the last values, which single outliers hardly move.

    Args:
        size: number of last values.
        least: number of values before which there is no score.
    """

    def __init__(self, size: int, least: int):
        self._values: deque[float] = deque(maxlen=size)
        self._least = least

    @property
    def median(self) -> float:
        return statistics.median(self._values)

    def score(self, value: float) -> float | None:
        """Robust z-score against the values before it: (value - median) / (1.4826 MAD). None while they are too few.

        Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993.
        """
        if len(self._values) < self._least:
            return None
        middle = self.median
        spread = _NORMAL_MAD * statistics.median(abs(each - middle) for each in self._values)
        return (value - middle) / max(spread, _LEAST_SPREAD * abs(middle), 1e-12)

    def add(self, value: float) -> None:
        """Takes a value in; one that is not finite is left out."""
        if math.isfinite(value):
            self._values.append(value)
