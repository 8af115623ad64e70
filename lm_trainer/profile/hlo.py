"""Parser for the text of compiled programs (HLO): arrays, instructions and how often they run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
"""Matches an array; the groups are its dtype and its comma-separated dimensions."""

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
# Matches memory space 1 in a tiled layout, which exists only on TPUs.
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^{}]*T\([^{}]*S\(1\)[^{}]*\}")
# Long lists contain a comment with the index at every fifth element.
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


def array_bytes(dtype: str, dims: str) -> float:
    """Returns the size of an array in bytes, from the two groups of `ARRAY`."""
    # A bool takes one byte; the names of other dtypes end in their number of bits. 4-bit numbers share bytes.
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8


def array_dimensions(shape: str) -> list[int]:
    """Returns the dimensions of the first array in a shape; [] if there is no array."""
    match = ARRAY.search(shape)
    return [int(d) for d in match[2].split(",") if d] if match else []


class Instruction(NamedTuple):
    """One instruction of a program."""

    name: str
    shape: str
    """Type of the result; several types are in parentheses."""
    opcode: str
    operands: list[str]
    """Names of operands, which are instructions of the same computation."""
    attributes: str
    """Text after the operands, which contains the attributes."""
    operand_text: str = ""
    """Operands as text: the number of a parameter, or the value of a constant."""
    is_root: bool = False
    """True if the instruction is the result of the computation."""

    @property
    def size(self) -> float:
        """Size of the result in bytes in device memory; results in a TPU's on-chip memory do not count."""
        return sum(array_bytes(dtype, dims) for dtype, dims in ARRAY.findall(_ON_CHIP.sub("", self.shape)))

    def called_computations(self, *keys: str) -> list[str]:
        """Returns the names of the computations that the attributes `keys` refer to."""
        return re.findall(rf"(?:{'|'.join(keys)})=\{{?%?([\w.\-]+)", self.attributes)


Computation = dict[str, Instruction]
"""Instructions by name, in program order."""


class Program(NamedTuple):
    """A compiled program."""

    entry: Computation
    computations: Mapping[str, Computation]
    """All computations by name."""


def parse_program(hlo: str) -> Program:
    """Parses the text of one program."""
    computations: dict[str, Computation] = {}
    current, entry = {}, {}
    for line in hlo.splitlines():
        if match := _HEADER.match(line):
            current = computations.setdefault(match[1], {})
            entry = current if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, tail = match.groups()
            inside, attributes = split_at_closing(tail)
            operands = [
                part.split()[-1].lstrip("%") for part in _split_at_commas(_COMMENT.sub("", inside)) if part.strip()
            ]
            current[name] = Instruction(name, shape, opcode, operands, attributes, inside, root is not None)
    return Program(entry, computations)


def split_at_closing(text: str, opening: str = "(", closing: str = ")") -> tuple[str, str]:
    """Splits a text at the bracket that closes one opened before it. If there is none, the second part is empty.

    Args:
        text: text after the opening bracket.
        opening: characters that open a bracket.
        closing: characters that close a bracket.
    """
    depth = 1
    for index, character in enumerate(text):
        depth += (character in opening) - (character in closing)
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""


def _split_at_commas(text: str) -> list[str]:
    """Splits a text at commas that are outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def walk_instructions(program: Program) -> Iterator[tuple[Instruction, Computation, float]]:
    """Yields the instructions that a program runs, each with its computation and number of runs.

    A fusion is one instruction; the instructions inside it are not yielded.
    """
    yield from _walk_computation(program.entry, 1.0, program.computations)


def walk_fusion(program: Program, op: Instruction) -> Iterator[tuple[Instruction, Computation]]:
    """Yields the instructions inside a fusion or asynchronous call, including nested ones, and their computations."""
    for name in op.called_computations("calls"):
        for inner in program.computations[name].values():
            yield inner, program.computations[name]
            yield from walk_fusion(program, inner)


def _walk_computation(
    computation: Computation, times: float, computations: Mapping[str, Computation]
) -> Iterator[tuple[Instruction, Computation, float]]:
    for op in computation.values():
        if op.opcode == "while":
            for body in op.called_computations("body"):
                yield from _walk_computation(computations[body], times * _trip_count(op, computations), computations)
        # call-start runs a computation on another unit, such as the SparseCores of a TPU.
        elif op.opcode in ("call", "call-start", "conditional"):
            for called in op.called_computations(
                "to_apply", "branch_computations", "true_computation", "false_computation"
            ):
                yield from _walk_computation(computations[called], times, computations)
        else:
            yield op, computation, times


def _trip_count(loop: Instruction, computations: Mapping[str, Computation]) -> int:
    """Returns the trip count of a loop; 1 if it cannot be parsed."""
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(match[1])
    # TPU programs do not state it. Loops over layers, microbatches and the like count from 0 to a constant.
    for name in loop.called_computations("condition"):
        condition = computations[name]
        last = [*condition.values()][-1]
        if last.opcode == "compare" and "direction=LT" in last.attributes:
            counter, bound = (condition[operand] for operand in last.operands)
            if bound.opcode != "constant":
                return 1
            return -(-int(bound.operands[0]) // _loop_increment(loop, counter, computations))
    return 1


def _loop_increment(loop: Instruction, counter: Instruction, computations: Mapping[str, Computation]) -> int:
    """Returns the increment of a loop's counter; 1 if it cannot be parsed.

    It is 2 if XLA unrolled the loop once, for example a loop that overlaps a product with the exchange of its pieces.
    """
    (name,), index_match = loop.called_computations("body"), re.search(r"index=(\d+)", counter.attributes)
    body = computations[name]
    result = [*body.values()][-1]
    if index_match is None or result.opcode != "tuple":
        return 1
    added = body[result.operands[int(index_match[1])]]
    constants = [body[operand] for operand in added.operands if body[operand].opcode == "constant"]
    return int(constants[0].operands[0]) if added.opcode == "add" and constants else 1
