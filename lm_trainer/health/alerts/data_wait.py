"""Alert: the run waits for data."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, NonNegativeInt

from lm_trainer.health.alerts.base import DATA_WAIT, AlertKind, Check


class DataWait(AlertKind):
    """The last steps spent much of their time waiting for data (`throughput/data_wait`)."""

    share: float = Field(default=0.2, gt=0, le=1)
    """Alert if at least this fraction of the time is spent waiting."""
    after: NonNegativeInt = 100
    """Number of steps at the start of an attempt without alerts, because text may still be tokenised then."""

    def build_check(self) -> Check:
        steps = 0

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal steps
            steps += 1
            waited = metrics.get(DATA_WAIT, 0.0)
            if steps <= self.after or waited < self.share:
                return None
            return f"{waited:.0%} of the time is spent waiting for data (`lmt bench data` says what it can deliver)"

        return check
