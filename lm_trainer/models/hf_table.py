"""Tables that describe the Hugging Face format of a family, and code that converts in both directions with them.

A family has two lists: fields of config.json, and tensors. Shapes follow from the model's own parameters, so a table
contains only names. A matrix in the file has two dimensions, because (heads, head_size) are merged into one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.models.hf_param import ParamInfo, ParamSlice
from lm_trainer.nn.layer_sections import slot_of_each_layer

MAX_PROBLEMS = 12

T = TypeVar("T")


@dataclass(frozen=True)
class HfField:
    """A field of config.json that corresponds to a setting of the model configuration."""

    hf: str
    setting: str
    default: Any
    """Value that transformers assumes if the key is absent."""
    old_names: tuple[str, ...] = ()
    """Names that earlier versions wrote. They are read if `hf` is absent, and never written."""
    read: Mapping[Any, Any] = field(default_factory=dict)
    """Maps values in the file to our names for them. Other values are used unchanged."""
    write: Mapping[Any, Any] = field(default_factory=dict)
    """Maps our values to their names in the file."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the file, or one tensor per layer (`{}` is the layer) and per expert (`{expert}`; without it, the
    tensor contains all experts of a layer).

    Several of our parameters are concatenated along the last dimension, in order. A layer without these parameters has
    no such tensor. A tensor without `{}` whose parameter has it contains this parameter of every layer.
    """

    hf: str
    params: tuple[str, ...]
    transposed: bool = False
    """The file has outputs before inputs, also in the matrix of each expert."""
    interleaved: bool = False
    """The parts alternate instead of being concatenated: head by head or, if they have no heads, element by element."""
    reversed: bool = False
    """The file has all dimensions in the opposite order, as in the weights of a convolution."""

    def file_order(self, dims: tuple[T, ...]) -> tuple[T, ...]:
        """Puts values of our dimensions into the order of the file. The function is its own inverse."""
        if self.reversed:
            return dims[::-1]
        return (*dims[:-2], dims[-1], dims[-2]) if self.transposed and len(dims) > 1 else dims


def linear_tensors(hf: str, *params: str, interleaved: bool = False) -> tuple[HfTensor, HfTensor]:
    """Lists weight and bias of a linear map whose weight in the file has outputs before inputs."""
    return (
        HfTensor(f"{hf}.weight", tuple(f"{name}.weight" for name in params), transposed=True, interleaved=interleaved),
        HfTensor(f"{hf}.bias", tuple(f"{name}.bias" for name in params), interleaved=interleaved),
    )


@dataclass(frozen=True)
class HfFamily:
    """Complete description of a family's Hugging Face format."""

    model_type: str
    architecture: str
    fields: tuple[HfField, ...]
    tensors: tuple[HfTensor, ...]
    prefix: str
    """Prefix of the name of every tensor. Files of a model without a head lack this prefix."""
    fixed: Mapping[str, Any]
    """Fields with a single supported value. Absent means this value, and other values in a file are refused."""
    computed_from_hf: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Computes settings that are not copies of a field of the file; raises ValueError for unsupported settings."""
    computed_to_hf: Callable[[Any], dict[str, Any]]
    """The inverse of `computed_from_hf`; raises ValueError for settings that the format cannot express."""
    inert: Mapping[str, Any] = field(default_factory=dict)
    """Fields that do not affect the results of a trained model, such as a dropout that is not supported here. Any value
    in a file is accepted, and files written here have this value."""
    read_only: tuple[str, ...] = ()
    """Fields of config.json that may be in a file, and are not always written: names of earlier versions, and fields
    that follow from others. A field that no table names is refused."""
    ignored: str = ""
    """Regular expression for names of tensors in older files that are not parameters."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Tensors of each layer (`{}`) without dimensions, which always have this value. `ignored` must match them too."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second names of tensors that a file may contain twice, mapped to their first names. Both must be equal, because
    the second is not a separate parameter."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Second names of tensors that are also written, mapped to their first names. `tied` must contain them too."""
    vocab_sizes: tuple[str, ...] = ()
    """Fields of config.json that equal `vocab_size`."""
    first_ignored_layer: int | None = None
    """Tensors of layers with this number or a higher one are ignored, as if they matched `ignored`; None: none."""
    unprefixed: tuple[str, ...] = ()
    """Tensors whose names never have the prefix."""
    reference: str | None = None
    """The best-known checkpoint of the family on the hub."""


@dataclass(frozen=True)
class NoHfFormat:
    """Marks a family without a format that transformers itself reads."""

    model_type: str
    """Name of the family in the config.json of published models."""
    reason: str


class FileTensor(NamedTuple):
    """A tensor of the file, and the slices of our parameters that it contains."""

    name: str
    table: HfTensor
    parts: tuple[ParamSlice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [part.file_shape for part in self.parts]
        shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return self.table.file_order(shape)

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Splits a tensor of the file into its parts, in our shapes."""
        x = self._transpose(tensor)
        if self.table.interleaved:
            # In the file, the query, key and value of each head are next to each other.
            size = self.parts[0].head_size
            heads = x.reshape(*x.shape[:-1], -1, len(self.parts), size)
            pieces = [heads[..., i, :] for i in range(len(self.parts))]
        else:
            ends = np.cumsum([part.file_shape[-1] for part in self.parts])[:-1]
            pieces = np.split(x, ends, axis=-1)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    def join(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Joins parts to a C-contiguous tensor of the file; the inverse of `split`."""
        if self.table.interleaved:
            shape, size = self.parts[0].file_shape, self.parts[0].head_size
            stacked = np.stack([piece.reshape(*shape[:-1], -1, size) for piece in pieces], axis=-2)
            joined = stacked.reshape(*shape[:-1], -1)
        else:
            flat = [piece.reshape(part.file_shape) for piece, part in zip(pieces, self.parts, strict=True)]
            joined = np.concatenate(flat, axis=-1) if len(flat) > 1 else flat[0]
        return np.ascontiguousarray(self._transpose(joined))

    def _transpose(self, x: np.ndarray) -> np.ndarray:
        """Puts the dimensions of our tensor into the order of the file, or the other way round."""
        return x.transpose(self.table.file_order(tuple(range(x.ndim))))


@dataclass(frozen=True)
class PendingTensor:
    """A tensor of a file that is assembled from our parameters when NumPy requests it; C-contiguous and exact."""

    entry: FileTensor
    params: Mapping[str, Any]
    """Parameters by dotted path."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Same as `FileTensor.shape`."""
        return self.entry.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Assembles the tensor, cast to `dtype` if it is given."""
        from lm_trainer.parallel.sharded_array import index_on_host

        del copy  # the result is always writable
        tensor = self.entry.join([index_on_host(self.params[part.path], part.index) for part in self.entry.parts])
        return tensor if dtype is None else tensor.astype(dtype, copy=False)


def settings_from_hf(family: HfFamily, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads our settings from the content of a config.json.

    Raises:
        UserError: for settings that have no counterpart here; names all of them.
    """
    problems = [
        f"{key}={hf[key]!r} is not supported, only {value!r} is"
        for key, value in family.fixed.items()
        if hf.get(key) not in (None, value)
    ]
    settings: dict[str, Any] = {}
    for entry in family.fields:
        value = next((hf[name] for name in (entry.hf, *entry.old_names) if hf.get(name) is not None), entry.default)
        # Only strings have aliases. A list would not be hashable.
        settings[entry.setting] = entry.read.get(value, value) if isinstance(value, str) else value
    try:
        settings |= family.computed_from_hf(hf)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise UserError(f"this {family.model_type} model cannot be read: {'; '.join(problems)}")
    return settings


def settings_to_hf(family: HfFamily, config: Any) -> dict[str, Any]:
    """Returns the content of config.json without the fields that depend on vocabulary and tokenizer.

    Raises:
        UserError: for a setting that the format cannot express.
    """
    try:
        computed = family.computed_to_hf(config)
    except ValueError as error:
        raise UserError(f"cannot be written as a Hugging Face {family.model_type} model: {error}") from None
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{entry.hf: _to_hf_value(entry, getattr(config, entry.setting)) for entry in family.fields},
        **computed,
        **family.fixed,
        **family.inert,
    }


def _to_hf_value(entry: HfField, value: Any) -> Any:
    return entry.write.get(value, value) if isinstance(value, str) else value


def params_from_tensors(
    family: HfFamily, leaves: Mapping[str, ParamInfo], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Reads our parameters by dotted path from the tensors of a file; exact, in the dtypes of the file.

    Raises:
        UserError: for missing, unknown and misshapen tensors, naming them.
    """
    entries = file_tensors(family, leaves)
    names, repeated = match_names(family, {entry.name for entry in entries}, tensors)
    problems = [
        f"{copy} differs from {first}, but this model has one tensor for both"
        for copy, first in repeated.items()
        if not np.array_equal(np.asarray(tensors[copy]), np.asarray(tensors[first]))
    ]
    pieces: dict[str, dict[tuple[int, ...], np.ndarray]] = {path: {} for path in leaves}
    for entry in entries:
        tensor = np.asarray(tensors[names[entry.name]])
        if tensor.shape != entry.shape:
            problems.append(_describe_shape_mismatch(names[entry.name], tensor.shape, entry))
            continue
        for part, piece in zip(entry.parts, entry.split(tensor), strict=True):
            pieces[part.path][part.index] = piece
    _raise_problems(problems)
    # Popped, so that the pieces of a parameter are freed as soon as they are stacked.
    return {path: _stack_slices(pieces.pop(path), leaf) for path, leaf in leaves.items()}


def check_tensors(
    family: HfFamily, entries: Iterable[FileTensor], shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Matches names like `match_names`, and compares shapes. Needs only the headers of files, and reads no tensors.

    Args:
        family: the table.
        entries: the expected tensors.
        shapes: shapes by name in the file.
        files: file of each tensor, for the message.

    Raises:
        UserError: for missing, unknown and misshapen tensors, naming them.
    """
    expected = {entry.name: entry for entry in entries}
    names, repeated = match_names(family, expected.keys(), shapes, files)
    entries_in_file = {names[name]: entry for name, entry in expected.items()}
    entries_in_file |= {copy: entries_in_file[first] for copy, first in repeated.items()}
    misshapen = {name: entry for name, entry in entries_in_file.items() if tuple(shapes[name]) != entry.shape}
    _raise_problems(
        _describe_shape_mismatch(name, shapes[name], entry) + _file_suffix(name, files)
        for name, entry in misshapen.items()
    )
    return names, repeated


def _describe_shape_mismatch(name: str, shape: tuple[int, ...], entry: FileTensor) -> str:
    return f"{name} has the shape {list(shape)}, expected {list(entry.shape)}"


def _file_suffix(name: str, files: Mapping[str, str]) -> str:
    return f" (in {files[name]})" if name in files else ""


def _stack_slices(pieces: dict[tuple[int, ...], np.ndarray], leaf: ParamInfo) -> np.ndarray:
    if () in pieces:
        return np.ascontiguousarray(pieces[()])
    return np.stack([pieces[index] for index in sorted(pieces)]).reshape(leaf.shape)


def tensors_from_params(
    family: HfFamily, leaves: Mapping[str, ParamInfo], params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Makes the tensors of a file from our parameters by dotted path; C-contiguous, exact, in the dtypes of `params`.

    Raises:
        UserError: for parameters that the format cannot express.
    """
    return {name: np.asarray(tensor) for name, tensor in pending_tensors(family, leaves, params).items()}


def pending_tensors(
    family: HfFamily, leaves: Mapping[str, ParamInfo], params: Mapping[str, Any]
) -> dict[str, PendingTensor]:
    """Makes the tensors of a file from our parameters by dotted path, in the dtypes of `params`, without assembling
    them yet.

    Raises:
        UserError: for parameters that the format cannot express.
    """
    entries = file_tensors(family, leaves)
    if unmapped := sorted(leaves.keys() - {part.path for entry in entries for part in entry.parts}):
        raise UserError(f"a Hugging Face {family.model_type} model has no place for {', '.join(unmapped)}")
    return {file_name(family, entry.name): PendingTensor(entry, params) for entry in entries}


def file_name(family: HfFamily, name: str) -> str:
    """Returns the name of a tensor in the file, including the prefix if there is one."""
    return name if name in family.unprefixed else family.prefix + name


def file_tensors(family: HfFamily, leaves: Mapping[str, ParamInfo]) -> list[FileTensor]:
    """Lists every tensor of the file, layer by layer."""
    entries = []
    for tensor in family.tensors:
        if "{}" not in tensor.hf:
            if slices := _find_slices(tensor, leaves):
                entries.append(FileTensor(tensor.hf, tensor, slices))
            continue
        layers_by_slot = _find_layers_by_slot(leaves, tensor.params[0].partition("blocks.{}")[0])
        numbers = sorted(number for layers in layers_by_slot for number in layers)
        for layer, (slot, row) in zip(numbers, slot_of_each_layer(layers_by_slot), strict=True):
            entries += _layer_entries(tensor, leaves, layer, slot=slot, row=row)
    return entries


def _find_slices(tensor: HfTensor, leaves: Mapping[str, ParamInfo]) -> tuple[ParamSlice, ...]:
    """Returns the slices of a tensor that belongs to no single layer; none if the model lacks its parameters."""
    if "{}" not in tensor.params[0]:
        is_complete = all(path in leaves for path in tensor.params)
        return tuple(ParamSlice(path, (), leaves[path]) for path in tensor.params) if is_complete else ()
    (template,) = tensor.params
    layers_by_slot = _find_layers_by_slot(leaves, template.partition("blocks.{}")[0])
    paths = [(template.format(slot), row) for slot, row in slot_of_each_layer(layers_by_slot)]
    return tuple(ParamSlice(path, (row,), leaves[path]) for path, row in paths if path in leaves)


def _find_layers_by_slot(leaves: Mapping[str, ParamInfo], module: str) -> list[range]:
    """Returns the layers of a module at each slot. The module's name is "" or ends with a dot."""
    layers: dict[str, range] = {}
    for path, leaf in leaves.items():
        if path.startswith(f"{module}blocks."):
            layers.setdefault(path.removeprefix(f"{module}blocks.").partition(".")[0], leaf.layers)
    return [layers[str(slot)] for slot in range(len(layers))]


def _layer_entries(
    tensor: HfTensor, leaves: Mapping[str, ParamInfo], layer: int, *, slot: int, row: int
) -> list[FileTensor]:
    paths = [path.format(slot) for path in tensor.params]
    if not all(path in leaves for path in paths):
        return []
    if "{expert}" not in tensor.hf:
        slices = tuple(ParamSlice(path, (row,), leaves[path]) for path in paths)
        return [FileTensor(tensor.hf.format(layer), tensor, slices)]
    return [
        FileTensor(
            tensor.hf.format(layer, expert=expert),
            tensor,
            tuple(ParamSlice(path, (row, expert), leaves[path]) for path in paths),
        )
        for expert in range(leaves[paths[0]].experts)
    ]


def match_names(
    family: HfFamily, expected: Collection[str], file_names: Iterable[str], files: Mapping[str, str] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Maps names of tensors without prefix to names in the file, and copies of tied tensors to their originals.

    Args:
        family: the table.
        expected: names without prefix.
        file_names: names in the file.
        files: file of each tensor, for the message.

    Raises:
        UserError: for missing and unknown tensors, naming them.
    """
    names: dict[str, str] = {}
    problems = []
    for name in file_names:
        name_without_prefix = name.removeprefix(family.prefix)
        if name_without_prefix in names:
            problems.append(f"{names[name_without_prefix]} and {name} are the same tensor")
        if name_without_prefix in expected or not _is_ignored(family, name_without_prefix):
            names[name_without_prefix] = name
    # A separate head is an expected tensor. A copy of the embedding is not.
    repeated = {
        names.pop(copy): names[original]
        for copy, original in family.tied.items()
        if copy not in expected and copy in names and original in names
    }
    problems += [f"{file_name(family, name)} is missing" for name in sorted(set(expected) - names.keys())]
    problems += [
        f"{names[name]} is unknown{_file_suffix(names[name], files or {})}"
        for name in sorted(names.keys() - set(expected))
    ]
    _raise_problems(problems)
    return names, repeated


def _is_ignored(family: HfFamily, name: str) -> bool:
    if re.fullmatch(family.ignored, name):
        return True
    layer = re.match(r"layers\.(\d+)\.", name)
    return layer is not None and family.first_ignored_layer is not None and int(layer[1]) >= family.first_ignored_layer


def _raise_problems(problems: Iterable[str]) -> None:
    problems = list(problems)
    if not problems:
        return
    more = f"\n... and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    raise UserError("the tensors do not fit the configuration:\n" + "\n".join(problems[:MAX_PROBLEMS]) + more)
