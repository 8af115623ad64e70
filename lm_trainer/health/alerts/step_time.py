"""Alert: steps take much longer than at the start."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.health.alerts.base import STEP_TIME, AlertKind, Check


class StepTime(AlertKind):
    """The median step time is much higher than at the start of this attempt."""

    factor: PositiveFloat = 2.0
    """Alert if the step time reaches this multiple of the usual step time."""
    steps: PositiveInt = 20
    """Number of recent steps whose median time is compared with the usual step time. The usual step time is the median
    of 100 steps at the start, after skipping this number of steps."""
    least: NonNegativeFloat = 0.1
    """Step time in seconds below which there are no alerts."""

    def build_check(self) -> Check:
        first: list[float] = []
        last: deque[float] = deque(maxlen=self.steps)

        def check(metrics: Mapping[str, float]) -> str | None:
            if STEP_TIME not in metrics:
                return None
            last.append(metrics[STEP_TIME])
            if len(last) < self.steps:
                return None
            if len(first) < _BASELINE_STEPS:
                first.append(metrics[STEP_TIME])
                return None
            current, usual = statistics.median(last), statistics.median(first)
            if current < max(self.factor * usual, self.least):
                return None
            return f"a step takes {current:.3g} s (median of {self.steps}), after {usual:.3g} s at the start"

        return check


_BASELINE_STEPS = 100
