"""Alert: the memory of a device is nearly full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from lm_trainer.health.alerts.base import AlertKind, Check


class DeviceMemory(AlertKind):
    """The memory of a device has been nearly full, once for each attempt; where JAX can tell, so not on a CPU."""

    share: float = Field(default=0.95, gt=0, le=1)
    """Share of what JAX may use, at its highest."""

    def open(self) -> Check:
        import jax

        told = False

        def check(metrics: Mapping[str, float]) -> str | None:
            nonlocal told
            del metrics
            full = 0.0 if told else max(map(_peak_share, jax.local_devices()))
            if full < self.share:
                return None
            # The peak never falls again.
            told = True
            return f"{full:.1%} of a device's memory was in use at its highest"

        return check


def _peak_share(device: Any) -> float:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return stats.get("peak_bytes_in_use", 0) / limit if limit else 0.0
