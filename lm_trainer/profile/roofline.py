"""Minimum times of the operations of a compiled program, based on two limits of the device.

This is the roofline model (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model").
An operation takes at least its FLOPs divided by the FLOP/s of a matrix product, and at least its bytes divided by the
bytes per second of a copy. The longer of the two times is its bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_trainer.profile.expert_kernels import grouped_kernel_flops
from lm_trainer.profile.hlo import (
    ARRAY,
    Computation,
    Instruction,
    Program,
    array_bytes,
    array_dimensions,
    parse_program,
    walk_fusion,
    walk_instructions,
)

BLOCK_SCALED_PRODUCT = "__cudnn$blockScaledDot"
"""Custom call for a block-scaled matrix product, which has a scale for each block of numbers in a row, as in MXFP8."""

# Instructions that move no data: they name, group or reinterpret data.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
# Instructions that read as many bytes as they return, regardless of the size of the operand.
_SLICES = {"dynamic-slice", "slice", "gather"}
# Instructions that are free inside a fusion, because the values stay in registers.
_THROUGH = {"bitcast", "reshape", "copy", "convert", "transpose"}
_OTHER = "other"


class Operation(NamedTuple):
    """One instruction of a program, totalled over all of its runs."""

    name: str
    """Name used by XLA, with the shape of the result."""
    part: str
    """Part of the model, and pass: `attention, forward`."""
    flops: float
    """Number of FLOPs of matrix products; a multiply-add counts as two. Elementwise work is not counted."""
    num_bytes: float
    """Number of bytes read and written."""


@dataclass(frozen=True)
class Bound:
    """Minimum time of several operations."""

    name: str
    flops: float
    num_bytes: float
    compute_seconds: float
    """Minimum time of the compute-bound operations."""
    memory_seconds: float
    """Minimum time of the memory-bound operations."""

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.memory_seconds

    @property
    def bound_by(self) -> str:
        """Bound that accounts for most of the time, `compute` or `memory`."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def compute_bounds(
    operations: Iterable[Operation], *, flops_per_second: float, bytes_per_second: float, by: str
) -> list[Bound]:
    """Returns minimum times, longest first, summed over operations with equal `by`: `name` or `part`."""
    sums_by_name: dict[str, list[float]] = {}
    for op in operations:
        sums = sums_by_name.setdefault(getattr(op, by), [0.0] * 4)
        compute, memory = op.flops / flops_per_second, op.num_bytes / bytes_per_second
        sums[0] += op.flops
        sums[1] += op.num_bytes
        # The bound is a maximum for each operation: the sum of maxima differs from the maximum of sums.
        sums[2 if compute >= memory else 3] += max(compute, memory)
    return sorted((Bound(name, *sums) for name, sums in sums_by_name.items()), key=lambda bound: -bound.seconds)


def list_operations(hlo: str, parts: Collection[str], *, times: int = 1) -> list[Operation]:
    """Returns the operations of an optimised program. The body of a loop counts once per iteration.

    Args:
        hlo: text of a single program.
        parts: names of `jax.named_scope` to distinguish; the part of operations outside of them is `other`.
        times: number of runs of the program.
    """
    program, listed = parse_program(hlo), []
    for op, computation, runs in walk_instructions(program):
        # An asynchronous operation counts at its start.
        if op.opcode not in _FREE and not op.opcode.endswith(("-done", "-update")):
            one = _make_operation(op, computation, program, parts)
            listed.append(one._replace(flops=times * runs * one.flops, num_bytes=times * runs * one.num_bytes))
    return listed


def _make_operation(op: Instruction, computation: Computation, program: Program, parts: Collection[str]) -> Operation:
    products = [(_operation_flops(one, of), one) for one, of in walk_fusion(program, op)]
    flops = _operation_flops(op, computation) + sum(count for count, _ in products)
    # XLA names a fusion after its last operation; here, a fusion with a matrix product is named after the product.
    product = max(products, key=lambda product_entry: product_entry[0], default=(0.0, op))
    named = product[1] if product[0] and "op_name=" in product[1].attributes else op
    inside = [program.computations[name] for name in op.called_computations("calls")]
    moved = _fusion_bytes(op, inside[0], program) if inside else _operation_bytes(op, computation)
    shape = re.sub(r"\{[^}]*\}", "", op.shape)
    return Operation(f"{_remove_number(op.name)} {shape}", _model_part(named.attributes, parts), flops, moved)


def _remove_number(name: str) -> str:
    return re.sub(r"(\.\d+)+$", "", name)


def _model_part(attributes: str, parts: Collection[str]) -> str:
    match = re.search(r'op_name="([^"]*)"', attributes)
    path = match[1] if match else ""
    part = next((name for name in re.findall(r"\w+", path) if name in parts), _OTHER)
    return f"{part}, {'backward' if 'transpose(' in path else 'forward'}" if path else _OTHER


def _operation_flops(op: Instruction, computation: Computation) -> float:
    """Returns the FLOPs of a matrix product: 2 x elements of the result x contraction size; 0 for any other kind."""
    if op.operands and op.operands[0] in computation:
        if f'"{BLOCK_SCALED_PRODUCT}"' in op.attributes:
            return 2.0 * math.prod(array_dimensions(op.shape)) * array_dimensions(computation[op.operands[0]].shape)[-1]
        if flops := grouped_kernel_flops(op, computation):
            return flops
        if op.opcode == "convolution":
            return _convolution_flops(op, *(array_dimensions(computation[name].shape) for name in op.operands[:2]))
        # The spelling of the attribute depends on the version of XLA.
        summed = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', op.attributes)
        if summed is not None:
            left = array_dimensions(computation[op.operands[0]].shape)
            axes = [int(axis) for axis in summed[1].replace('"', "").split(",") if axis]
            return 2.0 * math.prod(array_dimensions(op.shape)) * math.prod(left[axis] for axis in axes)
    return 0.0


def _convolution_flops(op: Instruction, left: list[int], right: list[int]) -> float:
    """Returns the FLOPs of a convolution. The TPU compiler turns matrix products into convolutions.

    Batch dimensions of the product become window positions, each of which overlaps the input at one position; the other
    positions are padding and cost nothing.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None:
        return 0.0
    inputs, kernel, result = (
        dict(zip(names, x, strict=True))
        for names, x in zip(labels.groups(), (left, right, array_dimensions(op.shape)), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", (re.search(r"window=\{([^}]*)\}", op.attributes) or [""])[0]))
    flops = 2.0 * result["b"] * result["f"] * kernel["i"]
    for dim in (label for label in result if label.isdigit()):
        of = {key: value.split("x")[int(dim)] for key, value in window.items()}
        flops *= _count_overlaps(inputs[dim], kernel[dim], result[dim], of)
    return flops


def _count_overlaps(size: int, kernel: int, result: int, window: Mapping[str, str]) -> int:
    """Counts pairs of a result position and a window position that refer to an element of the input."""
    stride, spread, holes = (int(window.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    low_padding = int(window.get("pad", "0_0").split("_")[0])
    positions = (np.arange(result) * stride - low_padding)[:, None] + np.arange(kernel) * holes
    return int(np.sum((positions >= 0) & (positions <= (size - 1) * spread) & (positions % spread == 0)))


def _operation_bytes(op: Instruction, computation: Computation) -> float:
    # A slice is both read and written.
    if op.opcode in _SLICES:
        return 2 * op.size
    if op.opcode == "slice-start":
        # It returns its full operand too, but reads only a slice of it, into on-chip memory.
        return array_bytes(*ARRAY.findall(op.shape)[-2])
    if op.opcode.endswith("-start"):
        # It also returns its operands, which are not counted.
        return op.size
    if op.opcode == "dynamic-update-slice":
        return 2 * computation[op.operands[1]].size
    return op.size + sum(computation[name].size for name in op.operands if name in computation)


def _fusion_bytes(op: Instruction, inside: Computation, program: Program) -> float:
    """Returns the bytes that a fusion reads and writes; of arrays it only slices or updates, only the slices count."""
    # An in-place update writes only its slice.
    updates = [i for i in inside.values() if i.opcode == "dynamic-update-slice"]
    into = {_find_origin(i.operands[0], inside) for i in updates}
    written = sum(inside[i.operands[1]].size for i in updates) if updates else op.size
    parameters = [i for i in inside.values() if i.opcode == "parameter" and i.name not in into]
    return written + sum(_bytes_read(parameter, parameter.size, inside, program) for parameter in parameters)


def _bytes_read(array: Instruction, size: float, inside: Computation, program: Program) -> float:
    """Returns the bytes that a fusion reads of an array: its slices if it is only sliced, otherwise `size`.

    The TPU compiler puts the slice of a layer's weights into a fusion inside the fusion of the product.
    """
    read = 0.0
    for user in (i for i in inside.values() if array.name in i.operands):
        # A slice of this array, not a slice at a position that the array gives.
        if user.opcode in _SLICES and array.name not in user.operands[1:]:
            read += user.size
        elif user.opcode == "bitcast":
            read += _bytes_read(user, size, inside, program)
        elif user.opcode == "fusion":
            (nested,) = (program.computations[name] for name in user.called_computations("calls"))
            numbers = [str(number) for number, name in enumerate(user.operands) if name == array.name]
            parameters = [i for i in nested.values() if i.opcode == "parameter" and i.operand_text in numbers]
            read += sum(_bytes_read(parameter, size, nested, program) for parameter in parameters)
        else:
            return size
    return min(read, size)


def _find_origin(name: str, inside: Computation) -> str:
    """Returns the name of the array that an instruction forwards unchanged."""
    while name in inside and inside[name].opcode in _THROUGH:
        name = inside[name].operands[0]
    return name
