"""The layers around each layer, with which it exchanges arrays while it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Neighbours(NamedTuple):
    """Kinds of the layers around each kind of layer, which differ only where a section of layers begins or ends."""

    kinds: Mapping[int, tuple[int, ...]]
    """Most frequent neighbours of a kind of layer, as positions in `Stages.kinds`."""
    positions: frozenset[int]
    """Positions in `Stages.order` of the layers with these neighbours."""


def find_neighbours(order: Sequence[int], layered: Sequence[bool], *offsets: int) -> Neighbours:
    """Finds the layers at certain distances from each layer.

    Args:
        order: kind of each stage, in order of execution.
        layered: which of these stages are layers.
        offsets: distances in this order; the layer below has the offset -1.
    """
    layers = {position for position, is_layer in enumerate(layered) if is_layer}
    surrounded = [p for p in sorted(layers) if layers.issuperset(p + offset for offset in offsets)]
    around = {position: tuple(order[position + offset] for offset in offsets) for position in surrounded}
    counts = Counter((order[position], kinds) for position, kinds in around.items())
    # In ascending order, so that the most frequent neighbours of a kind of layer replace the others.
    usual = {kind: kinds for (kind, kinds), _ in reversed(counts.most_common())}
    return Neighbours(usual, frozenset(p for p, kinds in around.items() if usual[order[p]] == kinds))
