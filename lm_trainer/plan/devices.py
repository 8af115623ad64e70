"""The devices of a plan: number, kind, usable memory, and emulation by CPU devices."""

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
"""Maximum number of emulated devices; with more, creating them and planning collectives takes minutes."""
_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


@dataclass(frozen=True)
class DeviceGroup:
    """A number of devices of one kind."""

    count: int
    kind: str
    """Equal to `jax.Device.device_kind`."""
    topology: str | None = None
    """The topology of a TPU slice, such as `4x4x4`, if given."""


@dataclass(frozen=True)
class Budget:
    """The memory a run may use on each device."""

    bytes: int
    origin: str


def parse_devices(text: str) -> DeviceGroup:
    """Reads `8xH100`, `8xNVIDIA H100 80GB HBM3`, or `v5p:4x4x4`, the chips of a TPU slice.

    Raises:
        UserError: for another format, or an unknown device.
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
    """Reads a number and a unit: `80GiB`, `24 GB`.

    Raises:
        UserError: for another format.
    """
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].lower() not in units or not float(match[1]):
        raise UserError(f"--memory {text}: expected a number and one of {', '.join(_UNITS)}, such as 80GiB")
    return int(float(match[1]) * units[match[2].lower()])


def memory_budget(kind: str, memory: int | None = None) -> Budget | None:
    """The memory of a device for a run; None if unknown.

    `memory` in bytes, else the fraction of the datasheet's figure that JAX allocates.

    Raises:
        UserError: if XLA_CLIENT_MEM_FRACTION, or its former name, is not a fraction.
    """
    if memory is not None:
        return Budget(memory, "--memory")
    datasheet = device_memory(kind)
    # On a GPU, JAX preallocates a fraction of the memory and manages it; on a TPU, it uses all memory.
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
    """Emulates `count` accelerators by CPU devices, with the JAX settings of a run except its platform.

    Raises:
        UserError: if JAX is initialised already, with other devices.
    """
    # JAX fixes platform and number of devices on first use: all settings must be made before.
    settings = {**trainer.jax_config, "jax_platforms": "cpu", "jax_num_cpu_devices": count}
    configure_jax(settings, trainer.jax_compilation_cache_dir, trainer.cpu_threads)
    devices = jax.devices()
    if devices[0].platform != "cpu" or len(devices) < count:
        raise UserError(
            f"JAX runs already, with {len(devices)} x {devices[0].device_kind}, not {count} emulated devices"
        )
    # A process that initialised JAX before may have more devices.
    return devices[:count]
