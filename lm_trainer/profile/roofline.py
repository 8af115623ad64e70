"""Least times of the operations of a compiled program, by two limits of the device.

The model is the roofline (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model").
An operation takes at least its FLOPs by the FLOP/s of a matrix product, and at least its bytes by the bytes per second
of a copy. Which of the two is longer says what bounds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_trainer.profile.hlo import ARRAY, Computation, Instruction, Program, array_bytes, dimensions, fused, parse, walk

BLOCK_SCALED_PRODUCT = "__cudnn$blockScaledDot"
"""The custom call of a product of two matrices whose rows have a scale for each block of numbers, as in MXFP8."""

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
    program, found = parse(hlo), []
    for op, computation, runs in walk(program):
        # An asynchronous operation counts where it starts.
        if op.opcode not in _FREE and not op.opcode.endswith(("-done", "-update")):
            one = _operation(op, computation, program, parts)
            found.append(one._replace(flops=times * runs * one.flops, num_bytes=times * runs * one.num_bytes))
    return found


def _operation(op: Instruction, computation: Computation, program: Program, parts: Collection[str]) -> Operation:
    products = [(_flops(one, of), one) for one, of in fused(program, op)]
    flops = _flops(op, computation) + sum(count for count, _ in products)
    # XLA names a fusion after its last operation; one that holds a matrix product is known by that product.
    product = max(products, key=lambda found: found[0], default=(0.0, op))
    named = product[1] if product[0] and "op_name=" in product[1].rest else op
    inside = [program.computations[name] for name in op.called("calls")]
    moved = _fused_bytes(op, inside[0]) if inside else _bytes_of(op, computation)
    shape = re.sub(r"\{[^}]*\}", "", op.shape)
    return Operation(f"{_kind(op.name)} {shape}", _part(named.rest, parts), flops, moved)


def _kind(name: str) -> str:
    return re.sub(r"(\.\d+)+$", "", name)


def _part(rest: str, parts: Collection[str]) -> str:
    found = re.search(r'op_name="([^"]*)"', rest)
    path = found[1] if found else ""
    part = next((name for name in re.findall(r"\w+", path) if name in parts), _OTHER)
    return f"{part}, {'backward' if 'transpose(' in path else 'forward'}" if path else _OTHER


def _flops(op: Instruction, computation: Computation) -> float:
    """FLOPs of a matrix product: 2 x elements of the result x length of the sums; 0 for any other instruction."""
    if op.operands and op.operands[0] in computation:
        if f'"{BLOCK_SCALED_PRODUCT}"' in op.rest:
            return 2.0 * math.prod(dimensions(op.shape)) * dimensions(computation[op.operands[0]].shape)[-1]
        if op.opcode == "convolution":
            return _convolution_flops(op, *(dimensions(computation[name].shape) for name in op.operands[:2]))
        # Two spellings of one attribute, by the version of XLA.
        summed = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', op.rest)
        if summed is not None:
            left = dimensions(computation[op.operands[0]].shape)
            axes = [int(axis) for axis in summed[1].replace('"', "").split(",") if axis]
            return 2.0 * math.prod(dimensions(op.shape)) * math.prod(left[axis] for axis in axes)
    return 0.0


def _convolution_flops(op: Instruction, left: list[int], right: list[int]) -> float:
    """FLOPs of a convolution, which is what a TPU makes of a matrix product.

    Batch dimensions of the product become positions of a window that meet in one place each; the others are padding,
    and no work.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest)
    if labels is None:
        return 0.0
    inputs, kernel, result = (
        dict(zip(names, x, strict=True))
        for names, x in zip(labels.groups(), (left, right, dimensions(op.shape)), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", (re.search(r"window=\{([^}]*)\}", op.rest) or [""])[0]))
    flops = 2.0 * result["b"] * result["f"] * kernel["i"]
    for dim in (label for label in result if label.isdigit()):
        of = {key: value.split("x")[int(dim)] for key, value in window.items()}
        flops *= _meetings(inputs[dim], kernel[dim], result[dim], of)
    return flops


def _meetings(size: int, kernel: int, result: int, window: Mapping[str, str]) -> int:
    """The pairs of a position of the result and one of the window that lie on an element of the input."""
    stride, spread, holes = (int(window.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(window.get("pad", "0_0").split("_")[0])
    at = (np.arange(result) * stride - before)[:, None] + np.arange(kernel) * holes
    return int(np.sum((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)))


def _bytes_of(op: Instruction, computation: Computation) -> float:
    # A slice is read and written.
    if op.opcode in _SLICES:
        return 2 * op.size
    if op.opcode == "slice-start":
        # It returns all of its operand as well, of which it reads a slice, on to the chip.
        return array_bytes(*ARRAY.findall(op.shape)[-2])
    if op.opcode.endswith("-start"):
        # It returns its operands as well.
        return op.size
    if op.opcode == "dynamic-update-slice":
        return 2 * computation[op.operands[1]].size
    return op.size + sum(computation[name].size for name in op.operands if name in computation)


def _fused_bytes(op: Instruction, inside: Computation) -> float:
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


def _origin(name: str, inside: Computation) -> str:
    """The array that an instruction passes on unchanged."""
    while name in inside and inside[name].opcode in _THROUGH:
        name = inside[name].operands[0]
    return name
