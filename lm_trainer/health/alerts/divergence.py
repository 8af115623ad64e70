"""Alert: the loss stays above its previous minimum."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from pydantic import PositiveFloat, PositiveInt

from lm_trainer.health.alerts.base import LOSS, AlertKind, Check


class Divergence(AlertKind):
    """The smoothed loss is well above its minimum in this attempt."""

    rise: PositiveFloat = 0.5
    """Alert if the smoothed loss is this far above its minimum, in nats per token. Before `window` steps have passed,
    the median covers only 10 steps, and the threshold is three times as high because this median is less smooth."""
    window: PositiveInt = 50
    """Number of steps in the running median of the loss."""

    def build_check(self) -> Check:
        # If a run diverges immediately, the long window would never contain a lower loss to compare with.
        windows = ((_RunningMedian(self.window), self.rise), (_RunningMedian(_FIRST_WINDOW), 3 * self.rise))

        def check(metrics: Mapping[str, float]) -> str | None:
            ready = [(smoothed, rise) for smoothed, rise in windows if smoothed.add(metrics[LOSS])]
            if not ready:
                return None
            loss, rise = ready[0]
            # If no loss was finite, the kind `non_finite` has already raised an alert.
            if not math.isfinite(loss.lowest) or loss.value < loss.lowest + rise:
                return None
            current = f"{loss.value:.4f} (median of {loss.steps} steps)"
            return f"the loss diverges: {current}, after {loss.lowest:.4f} at its lowest"

        return check


_FIRST_WINDOW = 10
"""Number of steps in the running median before the window is full."""


class _RunningMedian:
    """Running median of the loss, and its minimum."""

    def __init__(self, steps: int):
        self.steps = steps
        self._last: deque[float] = deque(maxlen=steps)
        self.value = self.lowest = math.inf

    def add(self, loss: float) -> bool:
        """Adds the loss of a step. Returns True once the window is full."""
        # Non-finite losses count as inf, so the median remains finite as long as they are few.
        self._last.append(loss if math.isfinite(loss) else math.inf)
        if len(self._last) < self.steps:
            return False
        self.value = statistics.median(self._last)
        self.lowest = min(self.lowest, self.value)
        return True
