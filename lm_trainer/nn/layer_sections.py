"""Division of the layers of a model into slots: the layers of a slot are stacked, and share a compiled program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class LayerSection(NamedTuple):
    """Consecutive layers that repeat a period; the last repeat may be incomplete."""

    layers: range
    """Numbers of the layers."""
    period: int
    first_slot: int = 0
    """Slot of the first layer, counted over all sections."""

    @property
    def slots(self) -> range:
        """Slots of the layers of one period."""
        return range(self.first_slot, self.first_slot + self.period)

    @property
    def layers_by_slot(self) -> tuple[range, ...]:
        """Numbers of the layers at each slot of the section."""
        return tuple(self.layers[offset :: self.period] for offset in range(self.period))


def find_sections(blocks: Sequence[Hashable], prefix: int) -> tuple[LayerSection, ...]:
    """Divides layers into the first `prefix` layers and the others, each with its smallest period."""
    sections, first_slot = list[LayerSection](), 0
    for layers in (range(prefix), range(prefix, len(blocks))):
        if layers:
            section = LayerSection(layers, _smallest_period([blocks[layer] for layer in layers]), first_slot)
            sections.append(section)
            first_slot += section.period
    return tuple(sections)


def slot_of_each_layer(layers_by_slot: Sequence[range]) -> list[tuple[int, int]]:
    """Returns the slot of each layer, and its row in the arrays of the slot.

    Args:
        layers_by_slot: numbers of the layers at each slot. Together these are consecutive.
    """
    rows = {number: (slot, row) for slot, layers in enumerate(layers_by_slot) for row, number in enumerate(layers)}
    return [rows[number] for number in sorted(rows)]


def _smallest_period(blocks: Sequence[Hashable]) -> int:
    """Returns the smallest number p > 0 with blocks[i] == blocks[i % p] for every i."""
    # Equal blocks have equal numbers, which are fast to compare.
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(block, len(numbers)) for block in blocks]
    return next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i - p] for i in range(p, len(kinds))))
