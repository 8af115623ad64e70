"""Devices of a plan: their number, kind and usable memory, and their emulation by CPU devices."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.core.xla_flags import MEMORY_FRACTION, MEMORY_VARIABLES
from lm_trainer.profile.devices import device_kind, device_memory, device_platform
from lm_trainer.run.config.trainer_config import TrainerConfig

_LIMIT = 4096
"""Maximum number of emulated devices. With more, creating them and planning collectives takes minutes."""
_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind, and their number."""

    count: int
    kind: str
    """Kind as in `jax.Device.device_kind`."""
    topology: str | None = None
    """Topology of a TPU slice, such as `4x4x4`, if given."""


@dataclass(frozen=True)
class Budget:
    """Memory that a run may use on each device."""

    bytes: int
    origin: str


def parse_devices(text: str) -> DeviceGroup:
    """Parses `8xH100`, `8xNVIDIA H100 80GB HBM3`, or `v5p:4x4x4`, which means the chips of a TPU slice.

    Raises:
        UserError: if the format is different or the device is unknown.
    """
    if slice_ := re.fullmatch(r"\s*(.*\S)\s*:\s*(\d+(?:x\d+){1,2})\s*", text):
        kind, count = device_kind(slice_[1]), math.prod(int(size) for size in slice_[2].split("x"))
        if device_platform(kind) != "tpu" or not 0 < count <= _LIMIT:
            raise UserError(f"--devices {text}: expected a TPU and up to {_LIMIT:,} chips, such as v5p:4x4x4")
        return DeviceGroup(count, kind, slice_[2])
    match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S.*)", text)
    if match is None or not 0 < int(match[1]) <= _LIMIT:
        raise UserError(
            f"--devices {text}: expected COUNTxKIND with a count up to {_LIMIT:,}, such as 8xH100, or a slice of TPUs, "
            f"such as v5p:4x4x4"
        )
    return DeviceGroup(int(match[1]), device_kind(match[2]))


def parse_bytes(text: str) -> int:
    """Parses a number with a unit, such as `80GiB` or `24 GB`.

    Raises:
        UserError: if the format is different.
    """
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].lower() not in units or not float(match[1]):
        raise UserError(f"--memory {text}: expected a number and one of {', '.join(_UNITS)}, such as 80GiB")
    return int(float(match[1]) * units[match[2].lower()])


def memory_budget(kind: str, memory: int | None = None) -> Budget | None:
    """Returns the memory of a device that a run may use; None if unknown.

    This is `memory` (in bytes) if given, otherwise the fraction of the datasheet's figure that JAX allocates.

    Raises:
        UserError: if XLA_CLIENT_MEM_FRACTION, or the variable's former name, is not a fraction.
    """
    if memory is not None:
        return Budget(memory, "--memory")
    datasheet = device_memory(kind)
    # On a GPU, JAX preallocates a fraction of the memory and manages it. On a TPU, it uses all memory.
    if datasheet is None or device_platform(kind) != "gpu":
        return None if datasheet is None else Budget(datasheet.bytes, datasheet.source)
    variable = next((name for name in MEMORY_VARIABLES if os.environ.get(name)), None)
    fraction_text = os.environ[variable] if variable else MEMORY_FRACTION
    try:
        fraction = float(fraction_text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UserError(f"{variable}={fraction_text}: expected a part of the memory, such as 0.9")
    reason = f"JAX takes, as {variable} says" if variable else "JAX takes, see docs/how-to/start-on-gpus.md"
    return Budget(int(fraction * datasheet.bytes), f"{fraction:.0%} of {datasheet.bytes / 1e9:.4g} GB, which {reason}")


def emulate_devices(trainer: TrainerConfig, count: int) -> Sequence[Any]:
    """Emulates `count` accelerators by CPU devices, with the run's JAX settings except the platform.

    Raises:
        UserError: if JAX is already initialised with other devices.
    """
    # JAX fixes the platform and the number of devices on first use, so all settings must be made before.
    settings = {**trainer.jax_config, "jax_platforms": "cpu", "jax_num_cpu_devices": count}
    configure_jax(settings, trainer.jax_compilation_cache_dir, trainer.cpu_threads)
    devices = jax.devices()
    if devices[0].platform != "cpu" or len(devices) < count:
        raise UserError(
            f"JAX runs already, with {len(devices)} x {devices[0].device_kind}, not {count} emulated devices"
        )
    # If JAX was initialised earlier in this process, there may be more devices.
    return devices[:count]
