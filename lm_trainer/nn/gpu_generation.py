"""Generation of the GPUs of this process."""

from __future__ import annotations

from typing import Any

import jax

AMPERE = (8, 0)
"""Compute capability of the first generation of GPUs with kernels for bfloat16."""


def local_gpu() -> Any | None:
    """Returns the first GPU of this process; None if it has none."""
    return next((device for device in jax.local_devices() if device.platform == "gpu"), None)


def gpu_capability(gpu: Any) -> tuple[int, ...]:
    """Returns the compute capability of a GPU of NVIDIA: major and minor number."""
    return tuple(map(int, gpu.compute_capability.split(".")))


def local_gpu_obstacle() -> str | None:
    """Returns the reason why kernels for NVIDIA GPUs since Ampere cannot run in this process; None if they can, or if
    the process only compiles for GPUs.
    """
    gpu = local_gpu()
    if gpu is None:
        return None
    if "cuda" not in gpu.client.platform_version:
        return f"{gpu.device_kind} is no GPU of NVIDIA"
    if gpu_capability(gpu) < AMPERE:
        return f"{gpu.device_kind} is of compute capability {gpu.compute_capability}, and it needs 8.0 (Ampere) or more"
    return None
