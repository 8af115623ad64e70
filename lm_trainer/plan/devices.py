"""The devices of a plan: their number and kind, the memory that a run may use, and CPUs in their place."""

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
from lm_trainer.profile.devices import device_kind, device_memory, device_platform
from lm_trainer.run.config.trainer_config import TrainerConfig

_MOST = 4096
"""Emulated devices at most; with more, making them and planning collectives takes minutes."""
_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_TAKEN_BY_JAX = 0.75
"""The fraction of a GPU's memory that JAX allocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise: see "GPU
memory allocation" in the JAX documentation."""


@dataclass(frozen=True)
class DeviceGroup:
    """A number of devices of one kind."""

    count: int
    kind: str
    """The same text as `jax.Device.device_kind`."""
    topology: str | None = None
    """The arrangement of a TPU slice, such as `4x4x4`, where it is given."""


@dataclass(frozen=True)
class Budget:
    """The memory that a run may use on each device."""

    bytes: int
    origin: str


def parse_devices(text: str) -> DeviceGroup:
    """Reads `8xH100`, `8xNVIDIA H100 80GB HBM3`, or `v5p:4x4x4`, the chips of a TPU slice.

    Raises:
        UserError: for another form, or a device that is not known.
    """
    if slice_ := re.fullmatch(r"\s*(.*\S)\s*:\s*(\d+(?:x\d+){1,2})\s*", text):
        kind, count = device_kind(slice_[1]), math.prod(int(size) for size in slice_[2].split("x"))
        if device_platform(kind) != "tpu" or not 0 < count <= _MOST:
            raise UserError(f"--devices {text}: expected a TPU and up to {_MOST:,} chips, such as v5p:4x4x4")
        return DeviceGroup(count, kind, slice_[2])
    match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S.*)", text)
    if match is None or not 0 < int(match[1]) <= _MOST:
        raise UserError(
            f"--devices {text}: expected COUNTxKIND with a count up to {_MOST:,}, such as 8xH100, or a slice of TPUs, "
            f"such as v5p:4x4x4"
        )
    return DeviceGroup(int(match[1]), device_kind(match[2]))


def parse_bytes(text: str) -> int:
    """Reads a number and a unit: `80GiB`, `24 GB`.

    Raises:
        UserError: for another form.
    """
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].lower() not in units or not float(match[1]):
        raise UserError(f"--memory {text}: expected a number and one of {', '.join(_UNITS)}, such as 80GiB")
    return int(float(match[1]) * units[match[2].lower()])


def budget(kind: str, memory: int | None = None) -> Budget | None:
    """The memory of a device for a run: `memory` in bytes, else the part of the datasheet's figure that JAX takes.

    None where neither is there.

    Raises:
        UserError: when XLA_PYTHON_CLIENT_MEM_FRACTION is no fraction.
    """
    if memory is not None:
        return Budget(memory, "--memory")
    found = device_memory(kind)
    # On a GPU, JAX allocates a part of the memory at the start and manages it; on a TPU it has all of it.
    if found is None or device_platform(kind) != "gpu":
        return None if found is None else Budget(found.bytes, found.source)
    given = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    try:
        fraction = _TAKEN_BY_JAX if given is None else float(given)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UserError(f"XLA_PYTHON_CLIENT_MEM_FRACTION={given}: expected a part of the memory, such as 0.9")
    why = "JAX takes, as XLA_PYTHON_CLIENT_MEM_FRACTION says" if given else "JAX takes by itself"
    return Budget(int(fraction * found.bytes), f"{fraction:.0%} of {found.bytes / 1e9:.4g} GB, which {why}")


def emulate_devices(trainer: TrainerConfig, count: int) -> Sequence[Any]:
    """Makes `count` CPU devices in place of the accelerators; applies the JAX settings of a run but for its platform.

    Raises:
        UserError: when JAX runs already, with other devices.
    """
    # JAX fixes platform and number of devices when it is first used: all settings have to come before.
    settings = {**trainer.jax_config, "jax_platforms": "cpu", "jax_num_cpu_devices": count}
    configure_jax(settings, trainer.jax_compilation_cache_dir, trainer.cpu_threads)
    found = jax.devices()
    if found[0].platform != "cpu" or len(found) < count:
        raise UserError(f"JAX runs already, with {len(found)} x {found[0].device_kind}, not {count} emulated devices")
    # A process that has set up JAX before may have more.
    return found[:count]
