"""Alert: the gradient of a step is far larger than previous gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import PositiveFloat, PositiveInt

from lm_trainer.health.alerts.base import GRAD_NORM, AlertKind, Check, RobustWindow


class GradNorm(AlertKind):
    """The gradient norm before clipping is far above previous norms, measured by a robust z-score of its logarithm."""

    threshold: PositiveFloat = 8.0
    """Minimum score for an alert, in standard deviations of a normal distribution."""
    factor: PositiveFloat = 4.0
    """The norm must also reach this multiple of the median norm."""
    window: PositiveInt = 128
    """Number of previous steps to compare with. There are no alerts until half as many steps are available."""

    def build_check(self) -> Check:
        window = RobustWindow(self.window, min_count=(self.window + 1) // 2)

        def check(metrics: Mapping[str, float]) -> str | None:
            norm = metrics[GRAD_NORM]
            # Norms vary over orders of magnitude, and their logarithms are distributed symmetrically.
            size = math.log(norm) if 0 < norm < math.inf else math.nan
            score = window.z_score(size)
            usual = math.exp(window.median) if score is not None else math.inf
            window.add(size)
            if score is None or not (score >= self.threshold and norm >= self.factor * usual):
                return None
            return f"the gradient's norm is {norm:.4g}, after {usual:.4g} (median of {self.window} steps)"

        return check
