"""Devices that are only described, so that their own compiler can compile for them without the hardware."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from lm_trainer.core.errors import UserError
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.gpu_target import gpu_target
from lm_trainer.profile.devices import device_platform

_GENERATIONS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
"""Maps kinds of device to their names in topologies."""
_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
"""Slices that exist; see "TPU configurations" in the documentation of Google Cloud."""


def target_devices(group: DeviceGroup) -> Sequence[Any]:
    """Returns the described devices of a group.

    These are GPUs in nodes of 8, or the chips of a TPU slice. If only a number of TPUs is given, they are the first
    chips of the smallest slice that has enough.

    Raises:
        UserError: if the kind is another one, the compiler is missing, or the slice does not exist.
    """
    if device_platform(group.kind) == "gpu":
        return _gpu_devices(group)
    if group.kind not in _GENERATIONS:
        raise UserError(
            f"--compile compiles for the TPUs {', '.join(_GENERATIONS.values())}, not for {group.kind!r}; leave it out"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "--compile needs the compiler for TPUs, which is the package libtpu: install it with pip install "
            "'lm_trainer[tpu]' (no TPU is needed), or leave --compile out"
        )
    name = _GENERATIONS[group.kind]
    shape = group.topology or _smallest_slice(_FLAT if name in ("v5e", "v6e") else _CUBIC, group.count)
    # Skips queries of the cloud's metadata server, silences warnings about the missing hardware, and lets several
    # processes use the compiler at once, which would otherwise own the chips of the machine exclusively.
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    os.environ.update({key: os.environ.get(key, value) for key, value in settings.items()})
    try:
        return topologies.get_topology_desc(f"{name}:{shape}", "tpu").devices[: group.count]
    except Exception as error:  # the plug-in may raise anything
        raise UserError(f"--devices {name}:{shape}: {str(error).splitlines()[0]}") from error


def _gpu_devices(group: DeviceGroup) -> Sequence[Any]:
    target = gpu_target(group.kind, group.count)
    try:
        return topologies.get_topology_desc("", "cuda", **target).devices[: group.count]
    except Exception as error:  # the plug-in may raise anything
        raise UserError(
            f"--compile: JAX's CUDA plug-in describes no {group.kind}: {str(error).splitlines()[0]}; is all of it "
            f"installed (pip install 'lm_trainer[gpu]')?"
        ) from error


def _smallest_slice(slices: Sequence[str], count: int) -> str:
    sizes = {shape: _count_chips(shape) for shape in slices}
    smallest = next((shape for shape, size in sizes.items() if size >= count), None)
    if smallest is None:
        raise UserError(
            f"--devices: no slice has {count:,} chips; the largest, {slices[-1]}, has {_count_chips(slices[-1]):,}"
        )
    return smallest


def _count_chips(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x"))
