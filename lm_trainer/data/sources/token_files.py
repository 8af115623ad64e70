"""Token files without an index: `.bin` files of nanoGPT, llm.c and modded-nanogpt; `.npy` files of OLMo and NumPy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import IO, ClassVar, Literal

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.files import File
from lm_trainer.data.sources.token_types import find_written_dtype
from lm_trainer.data.sources.tokens import (
    TokenArray,
    TokenFileSource,
    TokenShard,
    check_files_unchanged,
    count_tokens,
    require_local_path,
)

_NUMPY_MAGIC = b"\x93NUMPY"
_LLMC_DTYPES = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""Maps the first of the 256 int32 values in a header of llm.c to the dtype. The third value is the number of tokens."""
_LLMC_HEADER = 1024

_FOREIGN = {
    b"MMIDIDX\x00": "an index of Megatron; name its .bin file, with data.source: {type: megatron}",
    b"TNTIDX\x00\x00": "an index of fairseq, which is not read",
    b"PK\x03\x04": "a zip archive (an .npz, or weights of PyTorch), no tokens",
    b"PAR1": "a Parquet file; name it with the ending .parquet, or set data.source: {type: parquet}",
    b"ARROW1\x00\x00": "an Arrow file; name it with the ending .arrow, or set data.source: {type: arrow}",
    b"\x1f\x8b\x08\x00": "packed by gzip; unpack it",
    b"\x1f\x8b\x08\x08": "packed by gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it",
    b"\xfd7zXZ\x00": "packed by xz; unpack it",
    b"GGUF": "a model of llama.cpp, no tokens",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, which is not read",
}
"""Maps the first bytes of files in other formats to a description. Otherwise, their headers would be read as tokens."""


class TokenFiles(TokenFileSource):
    """Files of consecutive token ids of `data.tokenizer`, either raw or with a header of NumPy or llm.c.

    The tokens are memory-mapped, not copied.
    """

    type: Literal["tokens"] = "tokens"
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """The dtype of ids in files without a header. By default, it is uint16 if the vocabulary fits, and uint32
    otherwise."""
    document_ends: Literal["eos", "file"] = "eos"
    """`eos`: the end-of-document token ends documents. `file`: every file is one document, for data without an
    end-of-document token."""

    suffixes: ClassVar[tuple[str, ...]] = (".bin", ".npy")

    def make_token_shard(self, files: tuple[File, ...]) -> TokenShard:
        return TokenFileShard(files, self.dtype, self.document_ends)


@dataclass(frozen=True)
class TokenFileShard(TokenShard):
    """The files of a split. See `TokenShard`."""

    files: tuple[File, ...]
    dtype: str | None
    document_ends: Literal["eos", "file"] = "eos"

    @property
    def by_index(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.document_ends == "file"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def identity(self) -> dict[str, object]:
        ends = {"document_ends": self.document_ends} if self.by_index else {}
        return {"type": "tokens", "dtype": self.dtype, **ends, "files": [file.identity() for file in self.files]}

    def check_unchanged(self) -> None:
        check_files_unchanged(self.files)

    def token_arrays(self, dtype: np.dtype) -> list[TokenArray]:
        raw = dtype if self.dtype is None else np.dtype(self.dtype).newbyteorder("<")
        return [_make_token_array(file, raw) for file in self.files]

    def dtype_problem(self, ids_T: np.ndarray, header: int, vocab_size: int, eos_id: int) -> str | None:
        # The header defines the dtype.
        if header or (written := find_written_dtype(ids_T, vocab_size)) is None:
            return None
        read_in = ids_T.dtype.name
        # If 0 is the EOS token, documents of one token look like halves of wider ids, so an explicit dtype is trusted.
        if self.dtype is not None and eos_id == 0 and int(ids_T.max()) < vocab_size:
            return None
        problem = f"its ids were written as {written.name}, and are read as {read_in}"
        if written.byteorder == ">":
            return (
                f"{problem} with its bytes in the other order; write the file again: "
                f"numpy.fromfile(FILE, {written.str!r}).astype({written.newbyteorder('<').str!r}).tofile(FILE)"
            )
        sure = f" (or {read_in}, if they are that all the same)" if self.dtype is None else ""
        return f"{problem}; set data.source: {{type: tokens, dtype: {written.name}}}{sure}"

    def read_document_ends(self, number: int, array: TokenArray) -> np.ndarray | None:
        del number
        return np.array([array.count], np.int64) if self.by_index else None


def _make_token_array(file: File, raw: np.dtype) -> TokenArray:
    path = require_local_path(file)
    index = f"{path.removesuffix('.bin')}.idx"
    if path.endswith(".bin") and os.path.exists(index):
        raise UserError(f"beside {file.name} lies its index, {index}; set data.source: {{type: megatron}} to use it")
    dtype, header, header_count = raw, 0, None
    with open(path, "rb") as stream:
        begin = stream.read(_LLMC_HEADER)
        if begin.startswith(_NUMPY_MAGIC):
            stream.seek(0)
            dtype, header, header_count = _read_numpy_header(file, stream)
    if foreign := next((description for magic, description in _FOREIGN.items() if begin.startswith(magic)), None):
        raise UserError(f"{file.name} is {foreign}")
    if (magic := int.from_bytes(begin[:4], "little")) in _LLMC_DTYPES:
        if len(begin) < _LLMC_HEADER:
            raise UserError(f"{file.name} begins like a file of llm.c and ends inside of its header; it was cut short")
        dtype, header, header_count = _LLMC_DTYPES[magic], _LLMC_HEADER, int.from_bytes(begin[8:12], "little")
    count = count_tokens(file, header, dtype)
    if header_count is not None and header_count != count:
        raise UserError(
            f"{file.name} holds {count} tokens, but its header says {header_count}; it was cut short or damaged"
        )
    return TokenArray(file.name, path, "raw", dtype.str, header, count)


def _read_numpy_header(file: File, stream: IO[bytes]) -> tuple[np.dtype, int, int]:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise UserError(f"{file.name} begins like a NumPy file, but is none: {error}") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UserError(f"{file.name} holds {dtype.name} of shape {shape}; expected one row of integers")
    return dtype, stream.tell(), shape[0]
