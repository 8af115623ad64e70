"""Bytes that a compiled program sends between devices, read from its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from lm_trainer.profile.hlo import ARRAY, array_bytes

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_SENT: Mapping[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, _: size,
}
"""Bytes that one device sends, from those of its result and the number of devices: what a ring needs."""


def bytes_sent(hlo: str) -> dict[str, float]:
    """Collective -> bytes that each device sends in one run of an optimised program; loops count as one turn.

    Raises:
        ValueError: for a collective whose devices cannot be read from its line.
    """
    sent: dict[str, float] = {}
    for line in hlo.splitlines():
        if (found := _LINE.search(line)) is None:
            continue
        result, kind, start = found.groups()
        sizes = [array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(result)]
        # What starts an asynchronous collective returns its operands as well, before the results.
        size = sum(sizes[len(sizes) // 2 :] if start and kind != "all-reduce" else sizes)
        sent[kind] = sent.get(kind, 0.0) + _SENT[kind](size, 2 if kind == "collective-permute" else _devices(line))
    return sent


def _devices(line: str) -> int:
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        # `'a':(m)s` names a part of size s of an axis.
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    raise ValueError(f"which devices take part cannot be read from: {line.strip()[:200]}")
