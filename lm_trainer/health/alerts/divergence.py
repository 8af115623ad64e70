"""Alert: the loss stays above what it was."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from pydantic import PositiveFloat, PositiveInt

from lm_trainer.health.alerts.base import LOSS, AlertKind, Check


class Divergence(AlertKind):
    """The loss, smoothed, is well above the lowest that it has been in this attempt."""

    rise: PositiveFloat = 0.5
    """Nats per token above the lowest."""
    window: PositiveInt = 50
    """Steps whose median smooths the loss."""

    def open(self) -> Check:
        last: deque[float] = deque(maxlen=self.window)
        lowest = math.inf

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal lowest
            # One that is not finite counts as large: the median stays a number while they are few.
            last.append(metrics[LOSS] if math.isfinite(metrics[LOSS]) else math.inf)
            if len(last) < self.window:
                return None
            smooth = statistics.median(last)
            lowest = min(lowest, smooth)
            if smooth < lowest + self.rise:
                return None
            return f"the loss diverges: {smooth:.4f} (median of {self.window} steps), after {lowest:.4f} at its lowest"

        return check
