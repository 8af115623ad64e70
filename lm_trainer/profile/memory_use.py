"""Memory used by this process on the host and on its devices, and memory of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from lm_trainer.core.runtime import resident_bytes


def memory_meter() -> Callable[[], dict[str, float]]:
    """Returns a function that measures, in GiB, the memory figures that are available on this machine.

    The function returns `memory/host`, the resident memory of this process (on Linux), and `memory/device_peak`, the
    peak memory so far of the device that uses the most, if the backend reports it (not on a CPU).
    """
    counting = [device for device in jax.local_devices() if device.memory_stats()]

    def measure() -> dict[str, float]:
        metrics = {}
        if (host := resident_bytes()) is not None:
            metrics["memory/host"] = host / 2**30
        if counting:
            metrics["memory/device_peak"] = max(map(_peak_bytes, counting)) / 2**30
        return metrics

    return measure


def host_memory() -> int | None:
    """Returns the memory of this machine in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _peak_bytes(device: Any) -> int:
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
