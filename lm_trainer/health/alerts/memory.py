"""Alert: the memory of a device is nearly full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from lm_trainer.health.alerts.base import AlertKind, Check


class DeviceMemory(AlertKind):
    """The memory of a device was nearly full.

    There is at most one alert per attempt. The alert needs the memory statistics of JAX, which are not available on
    CPUs.
    """

    share: float = Field(default=0.95, gt=0, le=1)
    """Alert if the peak reaches this fraction of the memory available to JAX."""

    def build_check(self) -> Check:
        import jax

        alerted = False

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal alerted
            del metrics
            peak = 0.0 if alerted else max(map(_peak_memory_fraction, jax.local_devices()))
            if peak < self.share:
                return None
            # The peak never decreases.
            alerted = True
            return f"{peak:.1%} of a device's memory was in use at its highest"

        return check


def _peak_memory_fraction(device: Any) -> float:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return stats.get("peak_bytes_in_use", 0) / limit if limit else 0.0
