"""Groups of devices that take part in a collective, parsed from its HLO text.

XLA writes groups in three ways: as lists, `{{0,1},{2,3}}`; as an array of all devices that is reshaped, transposed and
split into rows, `[2,2]<=[2,2]T(1,0)`; or as axes of a mesh, `mesh['a'=2,'b'=2] {'a'}`.
"""

from __future__ import annotations

import math
import re

import numpy as np

_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=([^{]*))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
# `'a':(m)s` is a factor of axis a of size s, after factors of total size m.
_NAMED = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str) -> list[list[int]]:
    """Returns the groups of a collective.

    Args:
        attributes: text of the instruction after its operands.

    Returns:
        Indices into the devices of the program, for each group.

    Raises:
        ValueError: if the text contains no groups.
    """
    if match := _IOTA.search(attributes):
        shape = int(match[1]), int(match[2])
        dims = _parse_integers(match[3]) if match[3] else [math.prod(shape)]
        order = np.arange(math.prod(dims)).reshape(dims)
        return (order.transpose(_parse_integers(match[4])) if match[4] else order).reshape(shape).tolist()
    if match := _LISTS.search(attributes):
        return [_parse_integers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := _MESH.search(attributes):
        return _groups_of_mesh(match[1], match[2], match[3])
    raise ValueError(f"which devices take part cannot be read from: {attributes.strip()[:200]}")


def _groups_of_mesh(axes: str, device_ids: str | None, named: str) -> list[list[int]]:
    sizes = {axis: int(size) for axis, size in _AXIS.findall(axes)}
    factors = {axis: [size] for axis, size in sizes.items()}
    chosen: set[tuple[str, int]] = set()
    for axis, before, size in _NAMED.findall(named):
        if size:
            before, size = int(before), int(size)
            factors[axis] = [before, size, sizes[axis] // before // size]
        chosen.add((axis, 1 if size else 0))
    dims = [(axis, index, size) for axis, parts in factors.items() for index, size in enumerate(parts)]
    devices = np.arange(math.prod(sizes.values()))
    if device_ids and (match := re.search(r"\(?\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?", device_ids)):
        shape = _parse_integers(match[2]) if match[2] else [len(devices)]
        devices = devices.reshape(shape)
        devices = devices.transpose(_parse_integers(match[3])) if match[3] else devices
    grid = devices.reshape([size for _, _, size in dims])
    inner = [position for position, (axis, index, _) in enumerate(dims) if (axis, index) in chosen]
    outer = [position for position in range(len(dims)) if position not in inner]
    group_size = math.prod(dims[position][2] for position in inner)
    return grid.transpose([*outer, *inner]).reshape(-1, group_size).tolist()


def _parse_integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
