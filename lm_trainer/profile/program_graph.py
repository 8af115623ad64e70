"""Comparison of compiled programs as graphs, to find out whether two programs compute a value in the same way.

The text of a program also contains its schedule, its memory layouts, and other computations and exchanges, which do not
affect the bits of a value. Two values are equal if the same operations, in the same fusions (results are rounded at the
end of a fusion) and with the same kernels, compute them from the same arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from lm_trainer.profile.hlo import (
    Computation,
    Instruction,
    Program,
    array_dimensions,
    parse_program,
    split_at_closing,
)

Value = str | tuple["Value", ...]
"""Hash of how a value is computed; for a tuple, one hash for each element."""

_UNCHANGED = frozenset(
    (
        "copy",
        "copy-start",
        "copy-done",
        "optimization-barrier",
        "async-done",
        "async-update",
        "call-done",
        "fusion-done",
    )
)
"""Operations that return their operand unchanged."""
_CALLS = frozenset(("call", "async-start", "call-start"))
_SHAPES = frozenset(("bitcast", "reshape"))
_ACCUMULATES = frozenset(("convolution", "dot", "reduce", "reduce-window", "scatter", "custom-call"))
"""Operations whose order of additions may depend on tile sizes."""

_PIECES = 'custom_call_target="ConcatBitcast"'
_MEMORY_SPACE = re.compile(r":?S\(\d+\)(?=\})")
_BOUNDS = re.compile(r"\[(\d+):(\d+)\]")

_LAYOUT = re.compile(r"\{[^{}]*\}")
_UNIT = re.compile(r"(?<=[\[,])1(?:,|(?=\]))")
_IRRELEVANT = re.compile(r"\b(?:metadata|frontend_attributes|sharding|control-predecessors|origin)=\{")
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|body|called_computations|branch_computations)=\{?[^,}]*\}?")
_ALIASES = re.compile(r",?\s*output_to_operand_aliasing=\{(?:[^{}]|\{[^{}]*\})*\}")
_TILES = (
    "window_config",
    "convolution_algorithm_config",
    "gemm_backend_config",
    "fusion_backend_config",
    "cudnn_fmha_backend_config",
)
_SCHEDULE = (
    "used_scoped_memory_configs",
    "force_earliest_schedule",
    "operation_queue_id",
    "reification_cost",
    "wait_on_operation_queues",
    "device_type",
    "estimated_cycles",
    "iteration_bounds",
    "scoped_memory_configs",
    "aliasing_operands",
    "flag_configs",
    "retry_config",
    "outer_dimension_partitions",
)
"""Fields of a kernel's configuration that only affect when and where the kernel runs."""


def output_hashes(hlo: str) -> list[str]:
    """Computes a hash of how an optimised program computes each of its results from its arguments.

    Arguments are identified by their position. Axes of size 1 are ignored.

    Args:
        hlo: text of the program.

    Returns:
        One hash for each result, in order. Programs with equal hashes compute equal bits.
    """
    program = parse_program(hlo)
    root = next(op for op in program.entry.values() if op.is_root)
    result = _Hasher(program).hash_entry()[root.name]
    return [_flatten_value(value) for value in result] if isinstance(result, tuple) else [result]


class _Hasher:
    def __init__(self, program: Program):
        self._program = program
        self._functions: dict[str, str] = {}
        self._accumulating: dict[str, bool] = {}

    def hash_entry(self) -> dict[str, Value]:
        """Returns the values of the entry computation by name."""
        entry = self._program.entry
        parameters = [op for op in entry.values() if op.opcode == "parameter"]
        return self._hash_instructions(
            entry, {op.name: _digest("argument", op.operand_text, _normalize_shape(op.shape)) for op in parameters}
        )

    def _hash_instructions(self, computation: Computation, parameters: Mapping[str, Value]) -> dict[str, Value]:
        # Instructions are printed after their operands, so the operands are known.
        values: dict[str, Value] = dict(parameters)
        for op in computation.values():
            if op.name not in values:
                values[op.name] = self._hash_instruction(op, computation, values)
        return values

    def _hash_call(self, name: str, arguments: Sequence[Value]) -> Value:
        """Returns the hashes of the results of calling a computation, given the hashes of its arguments."""
        computation = self._program.computations[name]
        parameters = [op for op in computation.values() if op.opcode == "parameter"]
        root = next(op for op in computation.values() if op.is_root)
        return self._hash_instructions(computation, {op.name: arguments[int(op.operand_text)] for op in parameters})[
            root.name
        ]

    def _hash_instruction(self, op: Instruction, computation: Computation, values: Mapping[str, Value]) -> Value:
        operands = [values[name] for name in op.operands if name in values]
        if op.opcode in _UNCHANGED:
            return operands[0]
        if op.opcode in _SHAPES and _normalize_shape(op.shape) == _normalize_shape(computation[op.operands[0]].shape):
            return operands[0]
        if op.opcode == "get-tuple-element":
            return _element(operands[0], int(re.findall(r"index=(\d+)", op.attributes)[0]))
        if op.opcode == "tuple":
            return tuple(operands)
        if _PIECES in op.attributes and (prefetched := _prefetched_array(op, computation)) is not None:
            return values[prefetched]
        if op.opcode in _CALLS:
            return self._hash_call(op.called_computations("calls", "to_apply")[0], operands)
        if op.opcode == "fusion":
            return self._mark_as_fusion(
                self._hash_call(op.called_computations("calls")[0], operands), self._relevant_attributes(op)
            )
        if op.opcode == "while" and isinstance(operands[0], tuple):
            return self._hash_loop(op, operands[0])
        if op.opcode == "constant":
            return _digest("constant", _normalize_shape(op.shape), re.sub(r"[{}\s]", "", op.operand_text))
        functions = [
            self._hash_function(name)
            for name in op.called_computations("to_apply", "condition", "body", "branch_computations")
        ]
        literal = op.operand_text if op.opcode == "iota" else ""
        flat = [_flatten_value(value) for value in operands]
        return _digest(op.opcode, _normalize_shape(op.shape), literal, self._relevant_attributes(op), *functions, *flat)

    def _mark_as_fusion(self, value: Value, attributes: str) -> Value:
        if isinstance(value, tuple):
            return tuple(self._mark_as_fusion(element, attributes) for element in value)
        return _digest("fusion", attributes, value)

    def _hash_loop(self, op: Instruction, initial: tuple[Value, ...]) -> Value:
        """Returns the hashes of the values that a loop carries, whose order in the loop does not matter.

        A value is first identified by its initial value, and then by how an iteration computes it from all values,
        until no more of them can be told apart (partition refinement).
        """
        body, condition = op.called_computations("body")[0], op.called_computations("condition")[0]
        start = [_digest("carried", _flatten_value(value)) for value in initial]
        hashes, count = start, 0
        while len({*hashes}) > count:
            count = len({*hashes})
            state = tuple(hashes)
            stop, following = (self._hash_call(name, [state]) for name in (condition, body))
            hashes = [
                _digest(first, _flatten_value(_element(following, index)), _flatten_value(stop))
                for index, first in enumerate(start)
            ]
        # With the hashes of all values, because equal values of two loops may depend on values that differ.
        return tuple(_digest("while", self._relevant_attributes(op), value, *sorted({*hashes})) for value in hashes)

    def _hash_function(self, name: str) -> str:
        """Returns a hash of a computation that is independent of its arguments."""
        if name not in self._functions:
            parameters = [op for op in self._program.computations[name].values() if op.opcode == "parameter"]
            symbols = [_digest("symbol", index) for index in range(len(parameters))]
            self._functions[name] = _flatten_value(self._hash_call(name, symbols))
        return self._functions[name]

    def _accumulates(self, op: Instruction) -> bool:
        if op.opcode in _ACCUMULATES:
            return True
        return any(self._any_accumulates(name) for name in op.called_computations("calls"))

    def _any_accumulates(self, name: str) -> bool:
        if name not in self._accumulating:
            inner = self._program.computations[name].values()
            self._accumulating[name] = any(self._accumulates(op) for op in inner)
        return self._accumulating[name]

    def _relevant_attributes(self, op: Instruction) -> str:
        """Returns the attributes that affect the result, and the tile sizes of operations that accumulate."""
        text = _ALIASES.sub("", _CALLED.sub("", _without_irrelevant(op.attributes)))
        plain, _, config = text.partition("backend_config=")
        return re.sub(r"[\s,]+", " ", plain).strip() + self._relevant_kernel_config(op, config)

    def _relevant_kernel_config(self, op: Instruction, config: str) -> str:
        if not config or not self._accumulates(op):
            return ""
        body = "{" + _split_at_closing(config[1:])[0] + "}"
        try:
            fields = json.loads(body)
        except json.JSONDecodeError:
            return body
        if op.opcode == "custom-call":
            return json.dumps({key: x for key, x in fields.items() if key not in _SCHEDULE}, sort_keys=True)
        return json.dumps({key: _without_costs(fields[key]) for key in _TILES if key in fields}, sort_keys=True)


def _prefetched_array(op: Instruction, computation: Computation) -> str | None:
    """Returns the name of the array that an operation joins from pieces; None if they are not the whole array in order.

    A TPU compiler may copy an array to fast memory in pieces (`slice-start`), also as a sequence of bytes.
    """
    copies = [computation[name] for name in op.operands]
    if any(copy.opcode != "slice-done" for copy in copies):
        return None
    starts = [computation[copy.operands[0]] for copy in copies]
    source = starts[0].operands[0]
    sizes = array_dimensions(computation[source].shape)
    bounds = [_BOUNDS.findall(start.attributes.partition("slice={")[2].partition("}")[0]) for start in starts]
    pieces = [[(int(first), int(end)) for first, end in piece] for piece in bounds]
    # A slice with a stride has other bounds.
    if any(start.operands[0] != source for start in starts) or any(len(piece) != len(sizes) for piece in pieces):
        return None
    cut = [axis for axis, size in enumerate(sizes) if any(piece[axis] != (0, size) for piece in pieces)]
    ends = [0, *(piece[cut[0]][1] for piece in pieces)] if len(cut) == 1 else []
    if not ends or ends[-1] != sizes[cut[0]] or ends[:-1] != [piece[cut[0]][0] for piece in pieces]:
        return None
    viewed = computation[source].operands if computation[source].opcode == "bitcast" else []
    # The bytes are joined as they are, so the layout must be the same too.
    arrays = [name for name in (source, *viewed) if _in_memory(computation[name]) == _in_memory(op)]
    return arrays[0] if arrays else None


def _in_memory(op: Instruction) -> str:
    """Returns dtype, sizes and layout of an array, in whichever memory."""
    return _MEMORY_SPACE.sub("", op.shape)


def _element(value: Value, index: int) -> Value:
    """Returns an element of a tuple."""
    return value[index] if isinstance(value, tuple) else _digest("element", index, value)


def _without_costs(fields: object) -> object:
    """Removes time estimates, which do not affect the result."""
    if not isinstance(fields, dict):
        return fields
    return {key: x for key, x in fields.items() if "estimated" not in key and key != "cost_model_type"}


def _flatten_value(value: Value) -> str:
    return value if isinstance(value, str) else _digest("tuple", *map(_flatten_value, value))


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _normalize_shape(shape: str) -> str:
    """Returns a shape without its layout and without axes of size 1."""
    return re.sub(r",(?=\])", "", _UNIT.sub("", _LAYOUT.sub("", shape)))


def _without_irrelevant(text: str) -> str:
    while match := _IRRELEVANT.search(text):
        text = text[: match.start()] + _split_at_closing(text[match.end() :])[1]
    return text


def _split_at_closing(text: str) -> tuple[str, str]:
    # Quoted brackets come in pairs, so they can be counted too.
    return split_at_closing(text, "([{", ")]}")
