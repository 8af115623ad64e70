"""Alert: a non-finite loss or gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lm_trainer.health.alerts.base import GRAD_NORM, LOSS, AlertKind, Check


class NonFinite(AlertKind):
    """The loss or the gradient norm is NaN or infinite.

    `trainer.crash_on_nan` and `crash_on_inf` determine how the run reacts.
    """

    def build_check(self) -> Check:
        def check(metrics: Mapping[str, float]) -> str | None:
            bad = [f"{name} is {metrics[name]}" for name in (LOSS, GRAD_NORM) if not math.isfinite(metrics[name])]
            return ", ".join(bad) or None

        return check
