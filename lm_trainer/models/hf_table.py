"""Tables that say how a family is written in Hugging Face's format, and the machinery that reads them both ways.

A family is two lists: fields of config.json, and tensors. Shapes follow from the model's own parameters, so a table
holds names alone. A matrix in the file has two dimensions: (heads, head_size) are one there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError

MAX_PROBLEMS = 12


@dataclass(frozen=True)
class HfField:
    """A field of config.json whose value is a field of ours."""

    hf: str
    ours: str
    default: Any
    """What transformers takes when the key is absent."""
    older: tuple[str, ...] = ()
    """Names that earlier versions wrote; read when `hf` is absent, never written."""
    read: Mapping[Any, Any] = field(default_factory=dict)
    """Values of the file that have another name here; others are taken as they are."""


@dataclass(frozen=True)
class HfTensor:
    """One tensor of the file, or one per layer where `{}` stands for the layer.

    Several parameters of ours are concatenated along the last dimension, in order.
    """

    hf: str
    ours: tuple[str, ...]


@dataclass(frozen=True)
class HfFamily:
    """Everything that Hugging Face's format of one family needs."""

    model_type: str
    architecture: str
    fields: tuple[HfField, ...]
    tensors: tuple[HfTensor, ...]
    prefix: str
    """Of every tensor; a file of the bare trunk lacks it."""
    fixed: Mapping[str, Any]
    """Fields that have one value here; another one in a file is refused. Absent means this value."""
    computed_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Fields of ours that are no copy of a field of the file; raises ValueError for what has no place here."""
    computed_to_hf: Callable[[Any], dict[str, Any]]
    """The inverse of `computed_from_hf`; raises ValueError for what has no place in the format."""
    buffers: str
    """A regular expression for tensors of older files that hold no parameters."""
    tied: Mapping[str, str]
    """Tensors that a file may repeat under a second name: second -> first. They must be equal."""


@dataclass(frozen=True)
class Leaf:
    """Shape and logical axes of one parameter, with its `layers` axis where it has one."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of one layer with (heads, head_size) as one dimension."""
        merged: list[int] = []
        for size, axis in zip(self.layer_shape, self.axes[self.stacked :], strict=True):
            if axis == "head_size":
                merged[-1] *= size
            else:
                merged.append(size)
        return tuple(merged)


class _Entry(NamedTuple):
    """A tensor of the file, and the parameters and layers of ours that it holds."""

    name: str
    parts: tuple[tuple[str, int], ...]

    def shape(self, leaves: Mapping[str, Leaf]) -> tuple[int, ...]:
        shapes = [leaves[path].file_shape for path, _ in self.parts]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def read_config(family: HfFamily, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields from the content of a config.json.

    Raises:
        UserError: for a setting that has no counterpart here, naming all of them.
    """
    problems = [
        f"{key}={hf[key]!r} is not supported, only {value!r} is"
        for key, value in family.fixed.items()
        if hf.get(key) not in (None, value)
    ]
    ours: dict[str, Any] = {}
    for entry in family.fields:
        names = (entry.hf, *entry.older)
        value = next((hf[name] for name in names if hf.get(name) is not None), entry.default)
        ours[entry.ours] = entry.read.get(value, value) if isinstance(value, str) else value
    try:
        ours |= family.computed_from_hf(hf)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise UserError(f"this {family.model_type} model cannot be read: {'; '.join(problems)}")
    return ours


def write_config(family: HfFamily, config: Any) -> dict[str, Any]:
    """The content of config.json, less what depends on vocabulary and tokenizer.

    Raises:
        UserError: for a setting that the format has no place for.
    """
    try:
        computed = family.computed_to_hf(config)
    except ValueError as error:
        raise UserError(f"cannot be written as a Hugging Face {family.model_type} model: {error}") from None
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{entry.hf: getattr(config, entry.ours) for entry in family.fields},
        **computed,
        **family.fixed,
    }


def read_tensors(
    family: HfFamily, leaves: Mapping[str, Leaf], period: int, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Our parameters by dotted path, from the tensors of a file; exact, in the dtypes of the file.

    Raises:
        UserError: for missing, unknown and misshapen tensors, naming them.
    """
    entries = _entries(family, leaves, period)
    names = _match_names(family, {entry.name for entry in entries}, tensors)
    problems: list[str] = []
    rows: dict[str, dict[int, np.ndarray]] = {path: {} for path in leaves}
    for entry in entries:
        tensor = np.asarray(tensors[names[entry.name]])
        expected = entry.shape(leaves)
        if tensor.shape != expected:
            problems.append(f"{names[entry.name]} has the shape {list(tensor.shape)}, expected {list(expected)}")
            continue
        ends = np.cumsum([leaves[path].file_shape[-1] for path, _ in entry.parts])[:-1]
        for (path, row), part in zip(entry.parts, np.split(tensor, ends, axis=-1), strict=True):
            rows[path][row] = part.reshape(leaves[path].layer_shape)
    _raise(problems)
    return {path: _joined(rows.pop(path), leaf) for path, leaf in leaves.items()}


def _joined(rows: dict[int, np.ndarray], leaf: Leaf) -> np.ndarray:
    if not leaf.stacked:
        return np.ascontiguousarray(rows[0])
    return np.stack([rows[row] for row in range(leaf.shape[0])])


def write_tensors(
    family: HfFamily, leaves: Mapping[str, Leaf], period: int, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The tensors of a file from our parameters by dotted path; C-contiguous, exact, in the dtypes of `params`."""
    host = {path: np.asarray(params[path]) for path in leaves}
    tensors = {}
    for entry in _entries(family, leaves, period):
        parts = [
            (host[path][row] if leaves[path].stacked else host[path]).reshape(leaves[path].file_shape)
            for path, row in entry.parts
        ]
        whole = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        tensors[family.prefix + entry.name] = np.ascontiguousarray(whole)
    return tensors


def _entries(family: HfFamily, leaves: Mapping[str, Leaf], period: int) -> list[_Entry]:
    """Every tensor of the file; `period` as in `DecoderSpec`."""
    slots = [next(leaf for path, leaf in leaves.items() if path.startswith(f"blocks.{j}.")) for j in range(period)]
    layers = sum(leaf.shape[0] for leaf in slots)
    entries = []
    for tensor in family.tensors:
        if "{}" not in tensor.hf:
            entries.append(_Entry(tensor.hf, tuple((path, 0) for path in tensor.ours)))
            continue
        for layer in range(layers):
            slot, row = layer % period, layer // period
            entries.append(_Entry(tensor.hf.format(layer), tuple((path.format(slot), row) for path in tensor.ours)))
    return entries


def _match_names(family: HfFamily, expected: set[str], tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """From a tensor's name without prefix to its name in the file."""
    buffer = re.compile(family.buffers)
    names: dict[str, str] = {}
    problems = []
    for name in tensors:
        bare = name.removeprefix(family.prefix)
        if bare in names:
            problems.append(f"{names[bare]} and {name} are the same tensor")
        if not buffer.fullmatch(bare):
            names[bare] = name
    for second, first in family.tied.items():
        if second in names and first in names:
            copy = names.pop(second)
            if not np.array_equal(np.asarray(tensors[copy]), np.asarray(tensors[names[first]])):
                problems.append(f"{copy} differs from {names[first]}, but this model has one tensor for both")
    problems += [f"{family.prefix}{name} is missing" for name in sorted(expected - names.keys())]
    problems += [f"{names[name]} is unknown" for name in sorted(names.keys() - expected)]
    _raise(problems)
    return names


def _raise(problems: Iterable[str]) -> None:
    problems = list(problems)
    if not problems:
        return
    more = f"\n... and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    raise UserError("the tensors do not fit the configuration:\n" + "\n".join(problems[:MAX_PROBLEMS]) + more)
