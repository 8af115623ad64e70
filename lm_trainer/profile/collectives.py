"""Bytes that a compiled program sends between devices, read from its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from lm_trainer.profile.hlo import ARRAY, Instruction, Program, array_bytes, fused, parse, walk

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_KIND = re.compile(rf"({'|'.join(_KINDS)})(-start)?")
_SENT: Mapping[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, _: size,
}
"""Bytes that one device sends, from those of its result and the number of devices: what a ring needs."""


def bytes_sent(hlo: str) -> dict[str, float]:
    """Collective -> bytes that each device sends in one run of an optimised program.

    Raises:
        ValueError: for a collective whose devices cannot be read from its line.
    """
    sent: dict[str, float] = {}
    for op, times in _collectives(parse(hlo)):
        kind, start = _KIND.fullmatch(op.opcode).groups()  # pyright: ignore[reportOptionalMemberAccess]
        devices = 2 if kind == "collective-permute" else _devices(op.rest)
        sent[kind] = sent.get(kind, 0.0) + times * _SENT[kind](_size(op.shape, kind, start), devices)
    return sent


def _collectives(program: Program) -> Iterator[tuple[Instruction, float]]:
    """The collectives of a program, those inside fusions too, and how often each of them runs."""
    for op, _, times in walk(program):
        if _goes_on(op):
            continue
        # An all-reduce that a TPU's compiler fused with the slice that is left of it takes the time of a reduce-scatter
        # (Austin et al. 2025, "How to Scale Your Model", part 9).
        scatters = any(name.startswith("all-reduce-scatter") for name in op.called("calls"))
        for one in (op, *(inner for inner, _ in fused(program, op))):
            if _KIND.fullmatch(one.opcode):
                yield one._replace(opcode="reduce-scatter", shape=op.shape) if scatters else one, times


def _goes_on(op: Instruction) -> bool:
    """Returns true for a fusion that holds a collective which another one started.

    A TPU's program carries a collective through the fusions that it overlaps with, to the one that waits for its end.
    """
    carries = any(name.startswith("async_collective_fusion") for name in op.called("calls"))
    return carries or op.name.startswith("async-collective-done")


def _size(shape: str, kind: str, start: str | None) -> float:
    """The bytes of what a collective returns."""
    arrays = [(dtype, dims) for dtype, dims in ARRAY.findall(shape)]
    if start and kind != "all-reduce":
        # What starts an asynchronous collective returns its operands, its results, and scalars that tell of its state.
        arrays = [(dtype, dims) for dtype, dims in arrays if dims or dtype not in ("u32", "s32")]
        arrays = arrays[len(arrays) // 2 :]
    return sum(array_bytes(dtype, dims) for dtype, dims in arrays)


def _devices(rest: str) -> int:
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=[^{]*)? ?\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        # `'a':(m)s` names a part of size s of an axis.
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    raise ValueError(f"which devices take part cannot be read from: {rest.strip()[:200]}")
