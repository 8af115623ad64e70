"""TPU slices on Google Kubernetes Engine: node labels, topologies and number of chips per node.

Source: Google Kubernetes Engine documentation, "About TPUs in GKE" and "Plan TPUs in GKE".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lm_trainer.core.errors import UserError


@dataclass(frozen=True)
class TpuGeneration:
    """Properties of a TPU generation."""

    label: str
    """Value of the node label `cloud.google.com/gke-tpu-accelerator`."""
    dimensions: int
    """Number of dimensions of a topology."""
    counted_per_chip: int
    """Number by which the size in a name counts each chip: `v5p-128` has 64 chips, and `v6e-16` has 16."""
    devices_per_chip: int = 1
    """Number of JAX devices per chip."""


GENERATIONS = {
    "v4": TpuGeneration("tpu-v4-podslice", 3, 2),
    "v5e": TpuGeneration("tpu-v5-lite-podslice", 2, 1),
    "v5p": TpuGeneration("tpu-v5p-slice", 3, 2),
    "v6e": TpuGeneration("tpu-v6e-slice", 2, 1),
    "tpu7x": TpuGeneration("tpu7x", 3, 2, devices_per_chip=2),
}
_OTHER_NAMES = {"v5litepod": "v5e", "v7x": "tpu7x"}
_USUAL_CHIPS = 4
"""Number of chips per node, except in slices with a single node."""


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice: a set of chips connected by one fast network."""

    generation: TpuGeneration
    topology: tuple[int, ...]
    """Number of chips along each dimension."""
    chips_per_node: int

    @property
    def nodes(self) -> int:
        return math.prod(self.topology) // self.chips_per_node

    @property
    def devices(self) -> int:
        """Number of JAX devices over all nodes."""
        return math.prod(self.topology) * self.generation.devices_per_chip

    @property
    def topology_label(self) -> str:
        return "x".join(map(str, self.topology))


def is_tpu(accelerator: str) -> bool:
    """Returns True for the name of a TPU with or without a size, such as `v5p-128` or `v6e`."""
    return _parse_generation_name(accelerator) in GENERATIONS


def device_count(accelerator: str) -> int | None:
    """Returns the number of JAX devices of an accelerator with a size, such as `v5p-128`; None if unknown."""
    kind = GENERATIONS.get(_parse_generation_name(accelerator))
    chips = None if kind is None else _parse_num_chips(accelerator, kind)
    return None if kind is None or chips is None else chips * kind.devices_per_chip


def _parse_num_chips(accelerator: str, kind: TpuGeneration) -> int | None:
    size = re.search(r"-(\d+)$", accelerator)
    return None if size is None else int(size[1]) // kind.counted_per_chip


def find_tpu_slice(accelerator: str, topology: str | None, chips_per_node: int | None) -> TpuSlice:
    """Finds the TPU slice that the given options describe.

    Args:
        accelerator: TPU generation with a size (`v5p-128`), or without one (`v5p`) if a topology is given.
        topology: sides such as `4x4x8`; None selects the topology of this size that is nearest to a square or cube.
        chips_per_node: number of chips per node; None means 4, or all chips if the slice fits one machine.

    Raises:
        UserError: if no such slice exists, or the size does not match the topology.
    """
    kind = GENERATIONS[_parse_generation_name(accelerator)]
    chips = _parse_num_chips(accelerator, kind)
    if topology is None:
        if chips is None:
            raise UserError(f"--accelerator {accelerator}: give a size ({accelerator}-16) or --topology")
        sides = usual_topology(chips, kind.dimensions)
        if sides is None:
            raise UserError(f"--accelerator {accelerator}: no usual topology has {chips} chips; give --topology")
    else:
        if not re.fullmatch(r"\d+(x\d+)+", topology) or topology.count("x") + 1 != kind.dimensions:
            example = "x".join("4" * kind.dimensions)
            raise UserError(f"--topology {topology!r}: expected {kind.dimensions} numbers for this TPU, as {example}")
        sides = tuple(map(int, topology.split("x")))
        if chips is not None and math.prod(sides) != chips:
            raise UserError(f"--topology {topology} has {math.prod(sides)} chips, but {accelerator} has {chips}")
    result = TpuSlice(kind, sides, chips_per_node or _default_chips_per_node(math.prod(sides), kind))
    if math.prod(sides) % result.chips_per_node:
        raise UserError(f"--chips-per-node {result.chips_per_node} does not divide the {math.prod(sides)} chips")
    return result


def usual_topology(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """Returns the topology of a number of chips that is nearest to a square or cube.

    Returns:
        The sides, which are powers of 2, usually in ascending order; None if no such topology exists, for example if
        the number of chips is not a power of 2.
    """
    if chips < 1 or chips & (chips - 1) or (dimensions == 3 and chips < _USUAL_CHIPS):
        return None
    if dimensions == 3 and chips == _USUAL_CHIPS:
        # The four chips of a single node form a plane.
        return (2, 2, 1)
    power = chips.bit_length() - 1
    share, remainder = divmod(power, dimensions)
    return tuple(2 ** (share + (index >= dimensions - remainder)) for index in range(dimensions))


def _parse_generation_name(accelerator: str) -> str:
    name = re.sub(r"-\d+$", "", accelerator)
    return _OTHER_NAMES.get(name, name)


def _default_chips_per_node(chips: int, kind: TpuGeneration) -> int:
    return chips if kind.dimensions == 2 and chips <= 8 else min(chips, _USUAL_CHIPS)
