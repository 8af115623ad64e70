"""Devices that need not be present: their short names, and their memory and bandwidths from datasheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from lm_trainer.core.errors import UserError
from lm_trainer.profile.peaks import known_devices

_NVIDIA = "NVIDIA datasheet"
_TPU = "Google Cloud TPU documentation, system architecture"

_GIGABYTES: dict[str, tuple[float, str]] = {
    "NVIDIA GB200": (186, "NVIDIA GB200 NVL72 datasheet: 13.4 TB for 72 GPUs"),
    "NVIDIA B200": (180, "NVIDIA DGX B200 datasheet: 1,440 GB for 8 GPUs"),
    "NVIDIA H200": (141, _NVIDIA),
    "NVIDIA H200 NVL": (141, _NVIDIA),
    "NVIDIA H100 80GB HBM3": (80, _NVIDIA),
    "NVIDIA H100 NVL": (94, _NVIDIA),
    "NVIDIA H100 PCIe": (80, _NVIDIA),
    "NVIDIA A100-SXM4-40GB": (40, _NVIDIA),
    "NVIDIA A100-SXM4-80GB": (80, _NVIDIA),
    "NVIDIA A100-PCIE-40GB": (40, _NVIDIA),
    "NVIDIA A100 80GB PCIe": (80, _NVIDIA),
    "NVIDIA A10": (24, _NVIDIA),
    "NVIDIA A40": (48, _NVIDIA),
    "NVIDIA L4": (24, _NVIDIA),
    "NVIDIA L40S": (48, _NVIDIA),
    "Tesla V100-SXM2-16GB": (16, _NVIDIA),
    "Tesla V100-SXM2-32GB": (32, _NVIDIA),
    "Tesla V100-PCIE-16GB": (16, _NVIDIA),
    "Tesla V100-PCIE-32GB": (32, _NVIDIA),
    "NVIDIA GeForce RTX 4090": (24, "NVIDIA Ada GPU architecture whitepaper"),
    "TPU v2": (8, f"{_TPU}: 16 for a chip of two cores"),
    "TPU v3": (16, f"{_TPU}: 32 for a chip of two cores"),
    "TPU v4": (32, _TPU),
    "TPU v5 lite": (16, _TPU),
    "TPU v5": (95, _TPU),
    "TPU v6 lite": (32, _TPU),
}
"""Memory of one JAX device. A gigabyte is 10^9 bytes, as datasheets may mean it; drivers report slightly more."""

_BANDWIDTHS: dict[str, tuple[float, float | None, str]] = {
    "NVIDIA GB200": (8000, 900, "NVIDIA GB200 NVL72 datasheet"),
    "NVIDIA B200": (8000, 900, "NVIDIA DGX B200 datasheet"),
    "NVIDIA H200": (4800, 450, _NVIDIA),
    "NVIDIA H200 NVL": (4800, 450, _NVIDIA),
    "NVIDIA H100 80GB HBM3": (3350, 450, _NVIDIA),
    "NVIDIA H100 NVL": (3900, 300, _NVIDIA),
    "NVIDIA H100 PCIe": (2000, 300, _NVIDIA),
    "NVIDIA A100-SXM4-40GB": (1555, 300, _NVIDIA),
    "NVIDIA A100-SXM4-80GB": (2039, 300, _NVIDIA),
    "NVIDIA A100-PCIE-40GB": (1555, None, _NVIDIA),
    "NVIDIA A100 80GB PCIe": (1935, None, _NVIDIA),
    "NVIDIA A10": (600, None, _NVIDIA),
    "NVIDIA A40": (696, None, _NVIDIA),
    "NVIDIA L4": (300, None, _NVIDIA),
    "NVIDIA L40S": (864, None, _NVIDIA),
    "NVIDIA GeForce RTX 4090": (1008, None, "NVIDIA Ada GPU architecture whitepaper"),
    "TPU v4": (1228, 300, _TPU),
    "TPU v5 lite": (819, 200, _TPU),
    "TPU v5": (2765, 600, _TPU),
    "TPU v6 lite": (1640, 448, _TPU),
}
"""Memory bandwidth of one JAX device in GB/s, and the GB/s that it sends to its neighbours over NVLink or the links of
a TPU slice (half of a datasheet's figure for both directions); None if it has no such links."""

NODE = 8
"""Number of GPUs of a node, as in NVIDIA's DGX and HGX machines."""

_ADAPTERS = {"GB200": 50, "B200": 50, "H200": 50, "H100": 50, "A100-SXM4": 25}
"""Bandwidth in GB/s of the network adapter of each GPU in a DGX machine, by part of the machine's name: 400 Gb/s, but
200 Gb/s in the DGX A100 (user guides of these machines)."""

_SHORT = {
    "cpu": "cpu",
    "GB200": "NVIDIA GB200",
    "B200": "NVIDIA B200",
    "H200": "NVIDIA H200",
    "H100": "NVIDIA H100 80GB HBM3",
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "A10": "NVIDIA A10",
    "A40": "NVIDIA A40",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "V100": "Tesla V100-SXM2-32GB",
    "V100-16GB": "Tesla V100-SXM2-16GB",
    "RTX4090": "NVIDIA GeForce RTX 4090",
    "v2": "TPU v2",
    "v3": "TPU v3",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
}


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one JAX device."""

    bytes: int
    source: str


def device_kind(name: str) -> str:
    """Returns the `jax.Device.device_kind` for a short name. A device kind is returned as it is. Case is ignored.

    Raises:
        UserError: if the device is unknown.
    """
    # Returns the case used in the table, because only exact kinds have figures.
    kinds = {kind.lower(): kind for kind in (*known_devices(), *_SHORT.values())}
    names = kinds | {short.lower(): kind for short, kind in _SHORT.items()}
    if (kind := names.get(name.strip().lower())) is not None:
        return kind
    near = difflib.get_close_matches(name.strip().lower(), names, 1)
    shown = {key.lower(): key for key in (*kinds.values(), *_SHORT)}
    hint = f"did you mean {shown[near[0]]!r}? " if near else ""
    raise UserError(f"unknown device {name!r}; {hint}Known are {', '.join(_SHORT)}, or as JAX names them: "
                    f"{', '.join(known_devices())}")  # fmt: skip


def device_memory(kind: str) -> DeviceMemory | None:
    """Returns the datasheet's figure for a `jax.Device.device_kind`; None if there is none, as for a CPU."""
    entry = _GIGABYTES.get(kind)
    return None if entry is None else DeviceMemory(int(entry[0] * 1e9), entry[1])


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths of one JAX device, in bytes per second."""

    memory: float
    network: float | None
    """Maximum rate of sending to other devices of the same node or slice; None if there are no such links."""
    source: str
    between_nodes: float | None = None
    """Maximum rate of sending to devices of other nodes over the device's own network adapter, in a node of `NODE`
    devices; None for an unknown machine, and for a TPU, whose slice is one network."""


def device_bandwidths(kind: str) -> Bandwidths | None:
    """Returns the datasheet's figures for a `jax.Device.device_kind`; None if there are none, as for a CPU."""
    if (entry := _BANDWIDTHS.get(kind)) is None:
        return None
    memory, network, source = entry
    adapter = next((speed for name, speed in _ADAPTERS.items() if name in kind), None)
    between = None if adapter is None else adapter * 1e9
    return Bandwidths(memory * 1e9, None if network is None else network * 1e9, source, between)


def device_platform(kind: str) -> str:
    """Returns `cpu`, `gpu` or `tpu`: the value of `jax.default_backend` on a machine with such a device."""
    return "cpu" if kind == "cpu" else "tpu" if kind.startswith("TPU") else "gpu"


def is_older_than_ampere(kind: str) -> bool:
    """Returns true for datacenter GPUs before the generation Ampere, the first one without Tesla in its names."""
    return kind.startswith("Tesla ")
