"""Alert: steps take much longer than before."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.health.alerts.base import STEP_TIME, AlertKind, Check


class StepTime(AlertKind):
    """Steps take much longer than at the start of this attempt, for some time."""

    factor: PositiveFloat = 2.0
    """Multiple of the usual time."""
    steps: PositiveInt = 20
    """Steps whose median is compared with the usual time, that of the first 100 after as many."""
    least: NonNegativeFloat = 0.1
    """Seconds below which a step is never slow."""

    def open(self) -> Check:
        first: list[float] = []
        last: deque[float] = deque(maxlen=self.steps)

        def check(metrics: Mapping[str, float]) -> str | None:
            if STEP_TIME not in metrics:
                return None
            last.append(metrics[STEP_TIME])
            if len(last) < self.steps:
                return None
            if len(first) < _USUAL_STEPS:
                first.append(metrics[STEP_TIME])
                return None
            now, usual = statistics.median(last), statistics.median(first)
            if now < max(self.factor * usual, self.least):
                return None
            return f"a step takes {now:.3g} s (median of {self.steps}), after {usual:.3g} s at the start"

        return check


_USUAL_STEPS = 100
