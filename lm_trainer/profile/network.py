"""Time of transfers between devices, from the links of nodes of GPUs and of slices of TPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.profile.collectives import Transfer
from lm_trainer.profile.devices import NODE, device_bandwidths, device_platform

_CUBE = 4
"""Chips along an axis of a cube of TPU v4 or v5p. An axis of whole cubes is closed into a ring by optical switches."""
_LONGEST_FLAT_AXIS = 16
"""Chips along the axes of a full TPU v5e or v6e pod, the only ones that are closed into rings."""


@dataclass(frozen=True)
class Network:
    """The links between the devices of a program, which are numbered node by node."""

    links: float | None
    """Bytes per second a device sends over all of its links; None without links."""
    adapter: float | None = None
    """Bytes per second a device sends to other nodes through its own network adapter; None for a single network."""
    slice_axes: tuple[int, ...] = ()
    """Number of chips along each axis of a TPU slice."""
    rings: tuple[bool, ...] = ()
    """True for each axis whose ends are linked."""

    @classmethod
    def of(cls, kind: str, devices: Sequence[Any]) -> Network:
        """Returns the network of some devices.

        Args:
            kind: equal to `jax.Device.device_kind`.
            devices: JAX devices, which may be descriptions. TPU chips have `coords`.
        """
        bandwidths = device_bandwidths(kind)
        if bandwidths is None:
            return cls(None)
        coords = [coords for device in devices if (coords := getattr(device, "coords", None)) is not None]
        if device_platform(kind) != "tpu" or not coords:
            return cls(bandwidths.network, bandwidths.between_nodes)
        axes = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
        flat = "lite" in kind
        axes = axes[:2] if flat else axes
        rings = tuple(axis == _LONGEST_FLAT_AXIS if flat else axis % _CUBE == 0 for axis in axes)
        return cls(bandwidths.network, slice_axes=axes, rings=rings)

    def seconds(self, transfer: Transfer) -> float:
        """Returns a lower bound of the seconds that a transfer takes.

        Links inside a node and adapters between nodes work at the same time, so the slower one counts.
        """
        if self.links is None:
            return 0.0
        if self.slice_axes:
            full_exchange = transfer.kind == "all-to-all" and len(transfer.groups[0]) == math.prod(self.slice_axes)
            return transfer.bytes_sent / (self._exchange_rate() if full_exchange else self.links)
        between = transfer.bytes_between(NODE)
        inside = transfer.bytes_sent_inside(NODE) if between else transfer.bytes_sent
        return max(inside / self.links, between / (self.adapter or self.links))

    def bytes_between_nodes(self, transfer: Transfer) -> float:
        """Returns the bytes each device sends through its network adapter; 0 in a slice, which is a single network."""
        return 0.0 if self.slice_axes else transfer.bytes_between(NODE)

    def _exchange_rate(self) -> float:
        """Bytes per second at which each chip of a slice can send different bytes to every other chip.

        Half of all bytes cross the middle of each axis, over one link per line of chips, or two in a ring. The rate
        of the longest axis bounds the exchange.
        """
        assert self.links is not None
        link = self.links / (2 * len(self.slice_axes))
        rates = [
            (8 if ring else 4) * link / chips
            for chips, ring in zip(self.slice_axes, self.rings, strict=True)
            if chips > 1
        ]
        return min([self.links, *rates])
