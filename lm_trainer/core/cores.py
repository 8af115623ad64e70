"""The processor cores of this process."""

from __future__ import annotations

import os


def cores() -> int:
    """How many it may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
