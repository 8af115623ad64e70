"""Least times of the operations of a compiled program, by two limits of the device.

The model is the roofline (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model").
An operation takes at least its FLOPs by the FLOP/s of a matrix product, and at least its bytes by the bytes per second
of a copy. Which of the two is longer says what bounds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lm_trainer.profile.hlo import ARRAY, array_bytes

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# Instructions that move no data: they name, group or reinterpret it.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
# They read as much as they return, whatever the size of the array they are given.
_SLICES = {"dynamic-slice", "slice", "gather"}
# Inside a fusion they cost nothing: the values go through registers.
_THROUGH = {"bitcast", "reshape", "copy", "convert", "transpose"}
_OTHER = "other"


class Operation(NamedTuple):
    """One instruction of a program, over all of its runs."""

    name: str
    """As XLA calls it, with the shape of its result."""
    part: str
    """The part of the model and the pass: `attention, forward`."""
    flops: float
    """FLOPs of matrix products; a multiply-add counts as two. Elementwise work is not counted."""
    num_bytes: float
    """Read and written."""


@dataclass(frozen=True)
class Bound:
    """The least time of some operations."""

    name: str
    flops: float
    num_bytes: float
    compute_seconds: float
    """Least time of the operations that are bound by FLOPs."""
    memory_seconds: float
    """Least time of the operations that are bound by bytes."""

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.memory_seconds

    @property
    def bound_by(self) -> str:
        """The limit, `compute` or `memory`, that most of the time is bound by."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def bounds(
    operations: Iterable[Operation], *, flops_per_second: float, bytes_per_second: float, by: str
) -> list[Bound]:
    """The least times, longest first, added up over operations that agree in `by`: `name` or `part`."""
    found: dict[str, list[float]] = {}
    for op in operations:
        sums = found.setdefault(getattr(op, by), [0.0] * 4)
        compute, memory = op.flops / flops_per_second, op.num_bytes / bytes_per_second
        sums[0] += op.flops
        sums[1] += op.num_bytes
        # Each operation waits for the slower of the two; sums of the slower ones are not the slower of the sums.
        sums[2 if compute >= memory else 3] += max(compute, memory)
    return sorted((Bound(name, *sums) for name, sums in found.items()), key=lambda bound: -bound.seconds)


def operations(hlo: str, parts: Collection[str], *, times: int = 1) -> list[Operation]:
    """The operations of an optimised program; the body of a loop counts for each of its turns.

    Args:
        hlo: the text of the program, of one alone.
        parts: names of `jax.named_scope` to tell apart; operations in none of them are `other`.
        times: runs of the program.
    """
    program = _parse(hlo)
    return list(_visit(program.entry, float(times), program.computations, parts))


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str

    @property
    def size(self) -> float:
        """Bytes of the result."""
        return sum(array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(self.shape))

    def called(self, *keys: str) -> list[str]:
        """The computations that it names under `keys`."""
        return re.findall(rf"(?:{'|'.join(keys)})=\{{?%?([\w.\-]+)", self.rest)


_Computation = dict[str, _Instruction]


class _Program(NamedTuple):
    entry: _Computation
    computations: Mapping[str, _Computation]


def _parse(hlo: str) -> _Program:
    computations: dict[str, _Computation] = {}
    current, entry = {}, {}
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], {})
            entry = current if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            inside, after = _closing(rest)
            operands = [part.split()[-1].lstrip("%") for part in _split(inside) if part.strip()]
            current[name] = _Instruction(name, shape, opcode, operands, after)
    return _Program(entry, computations)


def _closing(text: str) -> tuple[str, str]:
    """Splits a text at the parenthesis that closes one which was opened before it."""
    depth = 1
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[:at], text[at + 1 :]
    return text, ""


def _split(text: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _visit(
    computation: _Computation, times: float, computations: Mapping[str, _Computation], parts: Collection[str]
) -> Iterator[Operation]:
    for op in computation.values():
        if op.opcode == "while":
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', op.rest)
            for body in op.called("body"):
                yield from _visit(computations[body], times * (int(turns[1]) if turns else 1), computations, parts)
        elif op.opcode in ("call", "conditional"):
            for called in op.called("to_apply", "branch_computations", "true_computation", "false_computation"):
                yield from _visit(computations[called], times, computations, parts)
        elif op.opcode not in _FREE:
            inner = [computations[called] for called in op.called("calls")]
            products = [(_flops(i, c), i) for c in inner for i in c.values()]
            flops = _flops(op, computation) + sum(count for count, _ in products)
            # XLA names a fusion after its last operation; one that holds a matrix product is known by that product.
            product = max(products, key=lambda found: found[0], default=(0.0, op))
            named = product[1] if product[0] and "op_name=" in product[1].rest else op
            moved = _fused_bytes(op, inner[0]) if inner else _bytes_of(op, computation)
            shape = re.sub(r"\{[^}]*\}", "", op.shape)
            yield Operation(f"{_kind(op.name)} {shape}", _part(named.rest, parts), times * flops, times * moved)


def _kind(name: str) -> str:
    return re.sub(r"(\.\d+)+$", "", name)


def _part(rest: str, parts: Collection[str]) -> str:
    found = re.search(r'op_name="([^"]*)"', rest)
    path = found[1] if found else ""
    part = next((name for name in re.findall(r"\w+", path) if name in parts), _OTHER)
    return f"{part}, {'backward' if 'transpose(' in path else 'forward'}" if path else _OTHER


def _flops(op: _Instruction, computation: _Computation) -> float:
    """FLOPs of a matrix product: 2 x elements of the result x length of the sums; 0 for any other instruction."""
    # Two spellings of one attribute, by the version of XLA.
    summed = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', op.rest)
    if summed is None or op.operands[0] not in computation:
        return 0.0
    left = _dims(computation[op.operands[0]].shape)
    axes = [int(axis) for axis in summed[1].replace('"', "").split(",") if axis]
    return 2.0 * math.prod(_dims(op.shape)) * math.prod(left[axis] for axis in axes)


def _dims(shape: str) -> list[int]:
    """The dimensions of the first array in a shape; [] without an array."""
    found = ARRAY.search(shape)
    return [int(d) for d in found[2].split(",") if d] if found else []


def _bytes_of(op: _Instruction, computation: _Computation) -> float:
    # A slice is read and written.
    if op.opcode in _SLICES:
        return 2 * op.size
    if op.opcode == "dynamic-update-slice":
        return 2 * computation[op.operands[1]].size
    return op.size + sum(computation[name].size for name in op.operands if name in computation)


def _fused_bytes(op: _Instruction, inside: _Computation) -> float:
    """Bytes that a fusion reads and writes: of arrays that it only slices, or writes slices into, the slices alone."""
    # An update in place writes its slice, and the rest of the array stays where it is.
    updates = [i for i in inside.values() if i.opcode == "dynamic-update-slice"]
    into = {_origin(i.operands[0], inside) for i in updates}
    written = sum(inside[i.operands[1]].size for i in updates) if updates else op.size
    read = 0.0
    for parameter in (i for i in inside.values() if i.opcode == "parameter"):
        users = [i for i in inside.values() if parameter.name in i.operands]
        if parameter.name in into:
            continue
        # Every use is a slice of this array, and not a slice at a position that the array gives.
        cut = bool(users) and all(i.opcode in _SLICES and i.operands[0] == parameter.name for i in users)
        read += sum(i.size for i in users) if cut else parameter.size
    return written + read


def _origin(name: str, inside: _Computation) -> str:
    """The array that an instruction passes on unchanged."""
    while name in inside and inside[name].opcode in _THROUGH:
        name = inside[name].operands[0]
    return name
