"""Rates of a device and its links, for the cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lm_trainer.profile.devices import NODE, Bandwidths, device_platform
from lm_trainer.profile.efficiency import Efficiency

_PCIE = 25e9
"""Bytes per second between GPUs without NVLink: PCIe 4.0 with 16 lanes has 32 GB/s, minus protocol overhead."""
_ADAPTER = 12.5e9
"""Bytes per second between nodes whose network adapter is unknown: 100 Gb/s."""


@dataclass(frozen=True)
class Machine:
    """Figures of a device that the cost model uses."""

    kind: str
    peak: float
    """Peak FLOP/s of one device, by its datasheet."""
    bandwidths: Bandwidths
    efficiency: Efficiency

    @property
    def product_rate(self) -> float:
        """FLOP/s of products with weights."""
        return self.peak * self.efficiency.products * self.efficiency.in_step

    def attention_rate(self, head_dim: int, *, backward: bool) -> float:
        """Returns the FLOP/s of an attention kernel."""
        return self.peak * self.efficiency.attention(head_dim, backward=backward) * self.efficiency.in_step

    @property
    def memory_rate(self) -> float:
        """Bytes per second of operations on whole arrays."""
        return self.bandwidths.memory * self.efficiency.memory * self.efficiency.in_step

    def link_bandwidth(self, participants: int, stride: int = 1, *, exchange: bool = False) -> float:
        """Returns the bytes per second that a device sends in a collective.

        Args:
            participants: number of devices of the collective.
            stride: number of devices from one participant to the next.
            exchange: True for an all-to-all, most of which goes between nodes, and in a TPU slice through other chips.
                Otherwise a ring passes through every participant of a node once, and their adapters share the
                traffic.
        """
        inside = (self.bandwidths.network or _PCIE) * self.efficiency.links
        if device_platform(self.kind) == "tpu":
            return inside * self._torus_share(participants, exchange=exchange)
        if device_platform(self.kind) != "gpu" or participants * stride <= NODE:
            return inside
        adapter = (self.bandwidths.between_nodes or _ADAPTER) * self.efficiency.adapters
        return min(inside, adapter if exchange else max(NODE // stride, 1) * adapter)

    def _torus_share(self, participants: int, *, exchange: bool) -> float:
        """Share of the links of a TPU that a collective uses.

        A slice is assumed to have as equal axes as possible, and a group to fill one axis after another: of 4 chips in
        a cube of v4 or v5p, of 16 in a pod of v5e or v6e. In an exchange, half of all bytes cross the middle of an
        axis of `side` chips, over the 2 links of each line that forms a ring.
        """
        axes, side = (2, 16) if "lite" in self.kind else (3, 4)
        if not exchange:
            return min(axes, math.ceil(math.log(max(participants, 2), side) - 1e-9)) / axes
        length = participants ** (1 / axes)
        links_across = 2 if length > side - 1e-9 else 1
        return min(1.0, 2 * links_across / (axes * length))
