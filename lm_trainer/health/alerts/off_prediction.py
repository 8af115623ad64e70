"""Alert: the loss leaves the band that was predicted before the run."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PositiveInt

from lm_trainer.core.config import LocalPath
from lm_trainer.health.alerts.base import STEP, AlertKind, Check
from lm_trainer.health.alerts.predicted_curve import read_curve


class OffPrediction(AlertKind):
    """The mean loss of several consecutive windows of steps is outside the band of a registered prediction."""

    file: LocalPath = Field(min_length=1)
    """Prediction that `lmt ladder register --curve` wrote for this run. A run with another batch, schedule, model or
    other data is refused."""
    windows: PositiveInt = 3
    """Number of consecutive windows outside the band before an alert. The file contains the length of a window, about a
    hundredth of the run."""

    def build_check(self) -> Check:
        registered = read_curve(self.file)
        curve = registered.curve
        losses: list[float] = []
        outside = 0

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal outside
            step = round(metrics[STEP])
            index = curve.window_of(step)
            if index is None or curve.metric not in metrics:
                return None
            last = curve.last_steps[index]
            if step == last - curve.window + 1:
                losses.clear()
            losses.append(metrics[curve.metric])
            # After a resume in the middle of a window, too few of its losses are known.
            if step < last or 2 * len(losses) < curve.window:
                return None
            mean = sum(losses) / len(losses)
            losses.clear()
            outside = 0 if curve.contains(index, mean) else outside + 1
            if outside < self.windows:
                return None
            side = "below" if mean < curve.low[index] else "above"
            return (
                f"the loss is {mean:.4f} in steps {last - curve.window + 1} to {last}, {side} its predicted band of "
                f"{curve.low[index]:.4f} to {curve.high[index]:.4f}, and outside it for {outside * curve.window} steps "
                f"(prediction of {registered.written[:10]}, sha256 {registered.sha256[:12]})"
            )

        return check
