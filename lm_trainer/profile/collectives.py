"""Bytes that a compiled program sends between devices, determined from its HLO text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from lm_trainer.profile.hlo import (
    ARRAY,
    Instruction,
    Program,
    array_bytes,
    parse_program,
    walk_fusion,
    walk_instructions,
)
from lm_trainer.profile.replica_groups import replica_groups

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_KIND = re.compile(rf"({'|'.join(_KINDS)})(-start)?")
_SENT: Mapping[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, _: size,
}
"""Number of bytes that one device sends in a ring algorithm, from the bytes of its result and the number of devices."""


def bytes_sent(hlo: str) -> dict[str, float]:
    """Returns, for each kind of collective, the bytes that each device sends in one run of an optimised program.

    Raises:
        ValueError: if the devices of a collective cannot be parsed from its line.
    """
    sent: dict[str, float] = {}
    for op, times in _find_collectives(parse_program(hlo)):
        kind, start = _KIND.fullmatch(op.opcode).groups()  # pyright: ignore[reportOptionalMemberAccess]
        devices = 2 if kind == "collective-permute" else len(replica_groups(op.attributes)[0])
        sent[kind] = sent.get(kind, 0.0) + times * _SENT[kind](_collective_bytes(op.shape, kind, start), devices)
    return sent


def _find_collectives(program: Program) -> Iterator[tuple[Instruction, float]]:
    """Yields the collectives of a program, including those inside fusions, each with its number of runs."""
    for op, _, times in walk_instructions(program):
        if _is_continued(op):
            continue
        # An all-reduce that the TPU compiler fused with the slice of its result takes as long as a reduce-scatter
        # (Austin et al. 2025, "How to Scale Your Model", part 9).
        scatters = any(name.startswith("all-reduce-scatter") for name in op.called_computations("calls"))
        for one in (op, *(inner for inner, _ in walk_fusion(program, op))):
            if _KIND.fullmatch(one.opcode):
                yield one._replace(opcode="reduce-scatter", shape=op.shape) if scatters else one, times


def _is_continued(op: Instruction) -> bool:
    """Returns true for a fusion that contains a collective that another fusion has started.

    A TPU program passes a collective through the fusions that it overlaps with, up to the fusion that waits for it.
    """
    carries = any(name.startswith("async_collective_fusion") for name in op.called_computations("calls"))
    return carries or op.name.startswith("async-collective-done")


def _collective_bytes(shape: str, kind: str, start: str | None) -> float:
    """Returns the size in bytes of the results of a collective."""
    arrays = [(dtype, dims) for dtype, dims in ARRAY.findall(shape)]
    if start and kind != "all-reduce":
        # The start of an asynchronous collective returns its operands, its results, and scalars that contain its state.
        arrays = [(dtype, dims) for dtype, dims in arrays if dims or dtype not in ("u32", "s32")]
        arrays = arrays[len(arrays) // 2 :]
    return sum(array_bytes(dtype, dims) for dtype, dims in arrays)
