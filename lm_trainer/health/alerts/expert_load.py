"""Alert: few experts get most tokens, or some get none."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, NonNegativeInt, PositiveInt

from lm_trainer.health.alerts.base import EXPERT_OVERLOAD, UNUSED_EXPERTS, AlertKind, Check


class ExpertLoad(AlertKind):
    """The load of experts stays uneven: `train/router_batch_overload` or `train/router_unused_experts` is high in many
    consecutive steps. Both are of the global batch, and means over layers.
    """

    overload: float = Field(default=4.0, gt=1)
    """Alert if the busiest expert gets at least this multiple of the mean load."""
    unused: float = Field(default=1.0, gt=0)
    """Alert if at least this number of experts per layer get no token."""
    steps: PositiveInt = 100
    """Number of consecutive steps with such a load before an alert."""
    after: NonNegativeInt = 200
    """Number of steps at the start of an attempt without alerts, because routers start uneven."""

    def build_check(self) -> Check:
        seen = uneven = 0

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal seen, uneven
            seen += 1
            overload, unused = metrics.get(EXPERT_OVERLOAD, 0.0), metrics.get(UNUSED_EXPERTS, 0.0)
            high = overload >= self.overload or unused >= self.unused
            uneven = uneven + 1 if high and seen > self.after else 0
            if uneven < self.steps:
                return None
            load = f"{overload:.1f} times the mean load, and {unused:.1f} experts of a layer had no token"
            return (
                f"for {uneven} steps the busiest expert had {load}; raise lbl_coef or selection_bias_rate of the model"
            )

        return check
