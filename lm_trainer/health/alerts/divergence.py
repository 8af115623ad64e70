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
    """Nats per token above the lowest; three times as many while there are fewer steps than `window`, since the median
    of 10 that is taken there is less smooth."""
    window: PositiveInt = 50
    """Steps whose median smooths the loss."""

    def open(self) -> Check:
        # A run that diverges at once would have no other loss to compare with by the time that the window is full.
        smoothed = ((_Smoothed(self.window), self.rise), (_Smoothed(_FEWEST), 3 * self.rise))

        def check(metrics: Mapping[str, float]) -> str | None:
            full = [(each, rise) for each, rise in smoothed if each.add(metrics[LOSS])]
            if not full:
                return None
            loss, rise = full[0]
            # Where none was finite, that is another kind.
            if not math.isfinite(loss.lowest) or loss.now < loss.lowest + rise:
                return None
            now = f"{loss.now:.4f} (median of {loss.steps} steps)"
            return f"the loss diverges: {now}, after {loss.lowest:.4f} at its lowest"

        return check


_FEWEST = 10
"""Steps whose median smooths the loss until there are enough for the window."""


class _Smoothed:
    """The median of the last losses, and the lowest that it has been."""

    def __init__(self, steps: int):
        self.steps = steps
        self._last: deque[float] = deque(maxlen=steps)
        self.now = self.lowest = math.inf

    def add(self, loss: float) -> bool:
        """Takes the loss of a step in; True once there are enough."""
        # One that is not finite counts as large: the median stays a number while they are few.
        self._last.append(loss if math.isfinite(loss) else math.inf)
        if len(self._last) < self.steps:
            return False
        self.now = statistics.median(self._last)
        self.lowest = min(self.lowest, self.now)
        return True
