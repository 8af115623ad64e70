"""Alert: the loss of a step is far above previous losses."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import PositiveFloat, PositiveInt

from lm_trainer.health.alerts.base import LOSS, AlertKind, Check, RobustWindow


class LossSpike(AlertKind):
    """The loss of a step is far above previous losses, measured by a robust z-score (median and MAD)."""

    threshold: PositiveFloat = 8.0
    """Minimum score for an alert, in standard deviations of a normal distribution."""
    window: PositiveInt = 128
    """Number of previous steps to compare with. There are no alerts until half as many steps are available."""

    def build_check(self) -> Check:
        window = RobustWindow(self.window, min_count=(self.window + 1) // 2)

        def check(metrics: Mapping[str, float]) -> str | None:
            loss = metrics[LOSS]
            score = window.z_score(loss)
            usual = window.median if score is not None else 0.0
            window.add(loss)
            # The score is NaN if the loss is NaN. In that case the kind `non_finite` raises an alert.
            if score is None or not score >= self.threshold:
                return None
            return f"the loss is {loss:.4f}, after {usual:.4f} (median of {self.window} steps; score {score:.1f})"

        return check
