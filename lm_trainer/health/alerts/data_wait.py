"""Alert: the run waits for data."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, NonNegativeInt

from lm_trainer.health.alerts.base import DATA_WAIT, AlertKind, Check


class DataWait(AlertKind):
    """Much of the time of the last steps was spent waiting for data (`throughput/data_wait`)."""

    share: float = Field(default=0.2, gt=0, le=1)
    """Share of the time from which to alert."""
    after: NonNegativeInt = 100
    """Steps of an attempt before the first alert: at the start, text may still be tokenised."""

    def open(self) -> Check:
        seen = 0

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal seen
            seen += 1
            waited = metrics.get(DATA_WAIT, 0.0)
            if seen <= self.after or waited < self.share:
                return None
            return f"{waited:.0%} of the time is spent waiting for data (`lmt bench data` says what it can deliver)"

        return check
