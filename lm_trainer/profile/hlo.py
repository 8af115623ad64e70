"""The text of compiled programs (HLO): arrays, instructions, and how often each of them runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
"""The dtype of an array, and its dimensions with commas between them."""

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
# Memory space 1 in a layout with tiles, which only TPUs have.
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^{}]*T\([^{}]*S\(1\)[^{}]*\}")
# Long lists say at every fifth place where they are.
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


def array_bytes(dtype: str, dims: str) -> float:
    """The bytes of an array, from the two groups of `ARRAY`."""
    # A truth value takes a byte; the other names end in their bits, and 4-bit numbers share bytes.
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8


def dimensions(shape: str) -> list[int]:
    """The dimensions of the first array in a shape; [] without an array."""
    found = ARRAY.search(shape)
    return [int(d) for d in found[2].split(",") if d] if found else []


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    shape: str
    """The type of the result; of several, all in parentheses."""
    opcode: str
    operands: list[str]
    """Names of instructions of the same computation."""
    rest: str
    """Everything behind the operands."""

    @property
    def size(self) -> float:
        """Bytes of the result in the memory of the device; what a TPU keeps on its chip is not there."""
        return sum(array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(_ON_CHIP.sub("", self.shape)))

    def called(self, *keys: str) -> list[str]:
        """The computations that it names under `keys`."""
        return re.findall(rf"(?:{'|'.join(keys)})=\{{?%?([\w.\-]+)", self.rest)


Computation = dict[str, Instruction]
"""Its instructions by name, in order."""


class Program(NamedTuple):
    """A compiled program."""

    entry: Computation
    computations: Mapping[str, Computation]
    """All of them, by name."""


def parse(hlo: str) -> Program:
    """Reads the text of one program."""
    computations: dict[str, Computation] = {}
    current, entry = {}, {}
    for line in hlo.splitlines():
        if found := _HEADER.match(line):
            current = computations.setdefault(found[1], {})
            entry = current if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            inside, after = _closing(rest)
            operands = [part.split()[-1].lstrip("%") for part in _split(_COMMENT.sub("", inside)) if part.strip()]
            current[name] = Instruction(name, shape, opcode, operands, after)
    return Program(entry, computations)


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


def walk(program: Program) -> Iterator[tuple[Instruction, Computation, float]]:
    """The instructions that a program runs, each with its computation and the number of its runs.

    What is fused is not among them: a fusion is one instruction.
    """
    yield from _walk(program.entry, 1.0, program.computations)


def fused(program: Program, op: Instruction) -> Iterator[tuple[Instruction, Computation]]:
    """The instructions inside a fusion or an asynchronous call, and inside fusions there, each with its computation."""
    for name in op.called("calls"):
        for inner in program.computations[name].values():
            yield inner, program.computations[name]
            yield from fused(program, inner)


def _walk(
    computation: Computation, times: float, computations: Mapping[str, Computation]
) -> Iterator[tuple[Instruction, Computation, float]]:
    for op in computation.values():
        if op.opcode == "while":
            for body in op.called("body"):
                yield from _walk(computations[body], times * _turns(op, computations), computations)
        # What starts a call hands it to a unit beside the cores, such as the SparseCores of a TPU.
        elif op.opcode in ("call", "call-start", "conditional"):
            for called in op.called("to_apply", "branch_computations", "true_computation", "false_computation"):
                yield from _walk(computations[called], times, computations)
        else:
            yield op, computation, times


def _turns(loop: Instruction, computations: Mapping[str, Computation]) -> int:
    """The turns of a loop; 1 where they cannot be read."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    # TPUs leave that out. Loops over layers, microbatches and the like count up from 0 and compare with a constant.
    for name in loop.called("condition"):
        condition = computations[name]
        last = [*condition.values()][-1]
        if last.opcode == "compare" and "direction=LT" in last.rest:
            counter, bound = (condition[operand] for operand in last.operands)
            if bound.opcode != "constant":
                return 1
            return -(-int(bound.operands[0]) // _step(loop, counter, computations))
    return 1


def _step(loop: Instruction, counter: Instruction, computations: Mapping[str, Computation]) -> int:
    """The number that a turn of a loop adds to its counter; 1 where that cannot be read.

    It is 2 where XLA unrolled a loop once, as those in which a product overlaps with the exchange of its pieces.
    """
    (name,), at = loop.called("body"), re.search(r"index=(\d+)", counter.rest)
    body = computations[name]
    result = [*body.values()][-1]
    if at is None or result.opcode != "tuple":
        return 1
    added = body[result.operands[int(at[1])]]
    constants = [body[operand] for operand in added.operands if body[operand].opcode == "constant"]
    return int(constants[0].operands[0]) if added.opcode == "add" and constants else 1
