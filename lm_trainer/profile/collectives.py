"""Bytes that a compiled program sends between devices, determined from its HLO text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from lm_trainer.profile.hlo import (
    ARRAY,
    Computation,
    Instruction,
    Program,
    array_bytes,
    parse_program,
    walk_fusion,
    walk_instructions,
)
from lm_trainer.profile.replica_groups import replica_groups

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_RAGGED = "ragged-"
"""Prefix of an all-to-all that sends only rows in use."""
_KIND = re.compile(rf"({_RAGGED})?({'|'.join(_KINDS)})(-start)?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_SENT: Mapping[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1) / n,
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1),
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, _: size,
}
"""Number of bytes that one device sends in a ring algorithm, from the bytes of its result and the number of devices."""


class Transfer(NamedTuple):
    """One collective of a program, over all of its runs in one run of the program."""

    kind: str
    """`all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`."""
    num_bytes: float
    """Bytes of the results on one device."""
    groups: list[list[int]]
    """Groups of devices that exchange data, as indices into the devices of the program; pairs of a source and a target
    for `collective-permute`."""

    @property
    def bytes_sent(self) -> float:
        """Bytes each device sends in a ring algorithm."""
        return _SENT[self.kind](self.num_bytes, len(self.groups[0]))

    def bytes_between(self, node: int) -> float:
        """Returns the bytes each device sends to other nodes of `node` devices; 0 if every group is inside a node.

        Devices of a node share what enters and leaves it: all of them send an equal part of what a node sends.
        """
        per_node = self._devices_per_node(node)
        group = len(self.groups[0])
        if per_node == group:
            return 0.0
        if self.kind in ("all-to-all", "collective-permute"):
            return self.num_bytes * ((group - per_node) / group if self.kind == "all-to-all" else 1)
        # A ring of nodes, in which every device passes on its share of what its node has.
        return _SENT[self.kind](self.num_bytes, group) * (1 - per_node / group) / (1 - 1 / group) / per_node

    def bytes_sent_inside(self, node: int) -> float:
        """Returns the bytes each device sends to devices of its node, if a group spans several nodes."""
        per_node, group = self._devices_per_node(node), len(self.groups[0])
        if self.kind == "collective-permute":
            return 0.0
        if self.kind == "all-to-all":
            return self.num_bytes * (per_node - 1) / group
        return _SENT[self.kind](self.num_bytes, group) * (1 - 1 / per_node) / (1 - 1 / group)

    def _devices_per_node(self, node: int) -> int:
        """Number of devices of the most spread group that are in one node."""
        return min(
            max(sum(other // node == device // node for other in group) for device in group) for group in self.groups
        )


def list_transfers(hlo: str) -> list[Transfer]:
    """The collectives of an optimised program.

    The number of rows that a ragged all-to-all sends is not known: its arrays have room for the most rows. It counts as
    if the smaller array were full, which it is if every device sends as many rows as it can and receives as many.

    Raises:
        ValueError: if a collective's devices cannot be parsed from its line.
    """
    transfers = []
    for op, computation, times in _find_collectives(parse_program(hlo)):
        ragged, kind, start = _KIND.fullmatch(op.opcode).groups()  # pyright: ignore[reportOptionalMemberAccess]
        groups = _pairs(op.attributes) if kind == "collective-permute" else replica_groups(op.attributes)
        if ragged:
            # The rows that are sent, and the array that receives rows.
            size = min(_array_bytes(computation[name].shape) for name in op.operands[:2])
        else:
            size = _collective_bytes(op.shape, kind, start)
        transfers.append(Transfer(kind, times * size, groups))
    return transfers


def bytes_sent(hlo: str) -> dict[str, float]:
    """Returns, for each kind of collective, the bytes that each device sends in one run of an optimised program.

    Raises:
        ValueError: if the devices of a collective cannot be parsed from its line.
    """
    return sum_bytes_sent(list_transfers(hlo))


def sum_bytes_sent(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Returns the bytes that each device sends, for each kind of collective."""
    sent: dict[str, float] = {}
    for transfer in transfers:
        sent[transfer.kind] = sent.get(transfer.kind, 0.0) + transfer.bytes_sent
    return sent


def _pairs(attributes: str) -> list[list[int]]:
    """The pairs of a source and a target of a permutation."""
    text = _PAIRS.search(attributes)
    pairs = [] if text is None else re.findall(r"\{(\d+),(\d+)\}", text[1])
    return [[int(source), int(target)] for source, target in pairs] or [[0, 1]]


def _find_collectives(program: Program) -> Iterator[tuple[Instruction, Computation, float]]:
    """Yields the collectives of a program, with their computations and numbers of runs, also those in fusions."""
    for op, computation, times in walk_instructions(program):
        if _is_continued(op):
            continue
        # An all-reduce that the TPU compiler fused with the slice of its result takes as long as a reduce-scatter
        # (Austin et al. 2025, "How to Scale Your Model", part 9).
        scatters = any(name.startswith("all-reduce-scatter") for name in op.called_computations("calls"))
        for inner, scope in ((op, computation), *walk_fusion(program, op)):
            if _KIND.fullmatch(inner.opcode):
                yield inner._replace(opcode="reduce-scatter", shape=op.shape) if scatters else inner, scope, times


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


def _array_bytes(shape: str) -> float:
    return sum(array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(shape))
