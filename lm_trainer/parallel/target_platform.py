"""Devices that programs are compiled for, which may not be the devices of the process that compiles them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """Devices that programs are compiled for."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    kind: str | None = None
    """Kind of device, as `jax.Device.device_kind`; None if it is unknown."""
    gpu_generation: int | None = None
    """Major version of the compute capability of an NVIDIA GPU; None if it is unknown."""


# Local to a thread. JAX includes it in the keys of its caches of traced functions, so functions are retraced for each
# target.
_target = jax.make_user_context(None)


def compilation_target() -> Target:
    """Returns the devices that the traced program will run on."""
    return _target.value or Target(jax.default_backend(), *_describe_local_device())


def target_platform() -> str:
    """Returns the platform that the traced program will run on: `cpu`, `gpu` or `tpu`."""
    return jax.default_backend() if _target.value is None else _target.value.platform


def compiling_for(target: str | Target) -> AbstractContextManager[object]:
    """Makes models choose kernels for a platform, or for devices, while this thread compiles for another machine.

    Threads that are started in this context must enter it themselves, as `compile_on_each` does.
    """
    return _target(Target(target) if isinstance(target, str) else target)


def _describe_local_device() -> tuple[str, int | None]:
    device = jax.local_devices()[0]
    is_nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version
    return device.device_kind, int(device.compute_capability.split(".")[0]) if is_nvidia else None
