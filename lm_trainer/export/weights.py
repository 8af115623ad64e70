"""Writes safetensors files in shards with an index, and reads them one tensor at a time.

Content of a file is never unpickled or executed, and a file name in an index cannot refer to another directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - teaches NumPy the name bfloat16, which safetensors looks up
import numpy as np

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.safe_names import path_inside
from lm_trainer.export.mxfp4_tensor import Mxfp4Tensor, join_mxfp4
from lm_trainer.export.nf4_files import Nf4Tensor, join_nf4
from lm_trainer.export.tensor_file import CHECKSUMS, StoredTensor, compute_checksums, order_metadata, read_header
from lm_trainer.models.text_part import text_tensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 2**20
"""Maximum size in bytes of a configuration or an index. Larger files are refused without being read."""

_COMPARED_BYTES = 64 << 20
"""Maximum size, as float32, of the part of each tensor in memory while two tensors are compared."""
_SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_WIDENED = frozenset({"F32", "F16", "BF16"})


def parse_size(text: str) -> int:
    """Parses a size such as `5GB` or `500MB`, and returns it in bytes; units are powers of 1000 as on the hub.

    Raises:
        UserError: for any other text, and for a size below one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _SIZE_UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UserError(f"{text!r} is not a size; write a number with a unit, such as 5GB or 500MB")
    return size


def write_weights(directory: Path, tensors: Mapping[str, Any], *, dtype: np.dtype, max_shard_size: int) -> None:
    """Writes `tensors`, cast to `dtype`, as one safetensors file, or as shards and an index above `max_shard_size`.

    Rounds to nearest even if `dtype` is narrower. A tensor is never split: if it is larger than `max_shard_size` bytes,
    it gets its own shard. Holds one shard in memory at a time, in addition to `tensors`. The values of `tensors` are
    arrays, or objects with a `size` that `np.asarray` converts to arrays.

    Raises:
        MachineError: if the file system reports an error, such as a full disk or missing permissions.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.size * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        # Arrays that share memory are written separately, because the format has no aliases.
        get_storage_id=lambda _: None,
        max_shard_size=max_shard_size,
    )
    for filename, names in plan.filename_to_tensors.items():
        write_safetensors(directory / filename, {name: tensors[name] for name in names}, dtype=dtype)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(directory / INDEX_FILE, index)


def write_safetensors(path: Path, tensors: Mapping[str, Any], *, dtype: np.dtype) -> None:
    """Writes `tensors`, cast to `dtype`, as one safetensors file.

    Raises:
        MachineError: if the file system reports an error.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        path.touch()
        mode = path.stat().st_mode
        # safetensors writes the memory of an array as if it were C-contiguous: a transposed view would be corrupted.
        ordered = {name: np.asarray(x, dtype=dtype, order="C") for name, x in tensors.items()}
        # transformers refuses a file that does not name its framework.
        save_file(ordered, path, metadata={"format": "pt", CHECKSUMS: compute_checksums(ordered)})
        order_metadata(path)
        # safetensors makes files readable only by their owner, regardless of the umask.
        path.chmod(mode & 0o777)
    except (SafetensorError, OSError) as error:
        raise MachineError(f"{path}: cannot be written ({error})") from None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON object with sorted keys, so that equal content gives equal bytes."""
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from an untrusted file.

    Raises:
        UserError: if the file is missing or too large, is a link out of its directory, or does not contain a JSON
            object.
    """
    path_inside(path.parent, path.name, path.parent)
    try:
        # Checked before reading, because an untrusted file may be of any size.
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(f"{path}: {size} bytes are too many for this file; at most {MAX_JSON_BYTES} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON ({error.msg})") from None
    except (UnicodeDecodeError, RecursionError):
        raise UserError(f"{path}: not a JSON text in UTF-8") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


class Weights(Mapping[str, np.ndarray]):
    """Tensors of a directory by name. Each tensor is read from its file on demand.

    Floating-point tensors are converted to float32, which is exact for float16 and bfloat16; other dtypes are
    unchanged. Pairs of tensors in MXFP4, and tensors that bitsandbytes has quantized to NF4, are one tensor, with its
    values in float32. `dtypes` has the names of the dtypes that occur (`F32`, `BF16`, ...). Of a model that also reads
    images or sound, only the tensors of the text model are listed, without the name of its module.

    Raises:
        UserError: when opened, for a directory without safetensors files, an index that refers to files outside it, or
            a file with a damaged header; when reading, for a dtype that cannot be read exactly.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        entries: dict[str, StoredTensor] = {}
        files = _read_headers(directory)
        for tensors in files.values():
            for name, tensor in tensors.items():
                if name in entries:
                    second_file, first_file = tensor.file.name, entries[name].file.name
                    raise UserError(f"{directory}: tensor {name!r} is both in {first_file} and in {second_file}")
                entries[name] = tensor
        joined: dict[str, StoredTensor | Mxfp4Tensor | Nf4Tensor] = join_nf4(join_mxfp4(entries))
        self.stored = text_tensors(joined)
        """Header entries of the tensors; no data is read yet."""
        self.left_out = len(joined) - len(self.stored)
        """Number of tensors of other parts than the text model."""
        self.files = tuple(sorted(files))
        self.dtypes = frozenset(tensor.dtype for tensor in self.stored.values())

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self.stored[name]
        tensor = stored.read()
        return tensor.astype(np.float32) if stored.dtype in _WIDENED else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor from the header."""
        return self.stored[name].shape

    def are_equal(self, one: str, other: str) -> bool:
        """Returns True if two tensors have the same shape and values. Holds a few rows of them in memory at a time."""
        shape = self.shape(one)
        if self.shape(other) != shape:
            return False
        length, *other_dims = shape or (1,)
        rows = max(1, _COMPARED_BYTES // (4 * max(1, int(np.prod(other_dims)))))
        regions = [(slice(start, min(start + rows, length)),) for start in range(0, length, rows)]
        first, second = self.stored[one], self.stored[other]
        return all(np.array_equal(first.read(region), second.read(region)) for region in regions)

    def shapes_and_files(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Returns the shape and the file name of every tensor."""
        shapes = {name: stored.shape for name, stored in self.stored.items()}
        return shapes, {name: stored.file.name for name, stored in self.stored.items()}


def _read_headers(directory: Path) -> dict[str, dict[str, StoredTensor]]:
    """Returns the tensors of each file by file name."""
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
    if index.exists():
        weight_map = _read_weight_map(index)
        files = {name: _read_file_header(directory, name, source=index) for name in sorted(set(weight_map.values()))}
        _check_index(index, weight_map, files)
        return files
    if single.exists():
        return {SINGLE_FILE: _read_file_header(directory, SINGLE_FILE, source=directory)}
    # The message mentions pickles, because a directory with only pickles is the most common case.
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise UserError(
            f"{directory}: {pickles[0]} is a pickle, which can run any code when it is opened, and is never read; "
            f"convert it to safetensors where you trust it: transformers' from_pretrained, then save_pretrained"
        )
    raise UserError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; expected a directory with safetensors weights")


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: expected a `weight_map` from tensor names to file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise UserError(
                f"{index}: {tensor} is placed in {name!r}; a shard's name has letters, digits, '_', '.' and '-' only "
                f"and ends with .safetensors"
            )
    return weight_map


def _check_index(index: Path, weight_map: Mapping[str, str], files: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise UserError(f"{index}: {tensor} should be in {name}, which does not hold it")
    for name, tensors in files.items():
        if unlisted := sorted(tensors.keys() - weight_map.keys()):
            raise UserError(f"{index}: {name} holds {unlisted[0]}, which the index does not list")


def _read_file_header(directory: Path, name: str, *, source: Path) -> dict[str, StoredTensor]:
    try:
        return read_header(path_inside(directory, name, source))
    except FileNotFoundError:
        raise UserError(f"{source}: {name} is missing; the download or the copy is incomplete") from None
