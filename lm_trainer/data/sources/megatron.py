"""Megatron's indexed datasets, which have the tokens in `NAME.bin` and the documents in `NAME.idx`."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.files import File, look_up_file
from lm_trainer.data.sources.tokens import (
    DocumentEnds,
    TokenArray,
    TokenFileSource,
    TokenShard,
    check_files_unchanged,
    count_tokens,
    require_local_path,
)

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Megatron(TokenFileSource):
    """Datasets written by Megatron's tools.

    `train_urls` names the `.bin` files, which have the `.idx` files next to them.

    The tokens are memory-mapped, not copied.
    """

    type: Literal["megatron"] = "megatron"
    document_ends: DocumentEnds = "eos"
    """`eos`: the end-of-document token ends documents, and must match the document ends in the index. `index`: only the
    index defines the document ends, for data without an end-of-document token."""

    def make_token_shard(self, files: tuple[File, ...]) -> TokenShard:
        for file in files:
            if not file.url.endswith(".bin"):
                raise UserError(f"{file.name}: name the .bin file of Megatron's data set; its .idx is found beside it")
        return MegatronShard(files, tuple(_find_index_file(file) for file in files), self.document_ends)


def _find_index_file(file: File) -> File:
    from fsspec.implementations.local import LocalFileSystem

    path = f"{require_local_path(file).removesuffix('.bin')}.idx"
    if not os.path.exists(path):
        raise UserError(f"{file.name} has no index: there is no {path}; for tokens alone, set data.source.type: tokens")
    return look_up_file(LocalFileSystem(), path, path)


@dataclass(frozen=True)
class MegatronShard(TokenShard):
    """The datasets of a split. See `TokenShard`."""

    files: tuple[File, ...]
    indexes: tuple[File, ...]
    document_ends: DocumentEnds

    @property
    def by_index(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.document_ends == "index"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def identity(self) -> dict[str, object]:
        files = [file.identity() for file in (*self.files, *self.indexes)]
        return {"type": "megatron", "document_ends": self.document_ends, "files": files}

    def check_unchanged(self) -> None:
        check_files_unchanged((*self.files, *self.indexes))

    def token_arrays(self, dtype: np.dtype) -> list[TokenArray]:
        del dtype
        arrays = []
        for file, index in zip(self.files, self.indexes, strict=True):
            ids = _read_header(index)[0]
            arrays.append(
                TokenArray(file.name, require_local_path(file), "raw", ids.str, 0, count_tokens(file, 0, ids))
            )
        return arrays

    def read_document_ends(self, number: int, array: TokenArray) -> np.ndarray:
        index = self.indexes[number]
        dtype, sequences, documents = _read_header(index)
        with open(index.url, "rb") as stream:
            stream.seek(_HEADER.size)
            lengths_N = np.fromfile(stream, "<i4", sequences).astype(np.int64)
            pointers_N = np.fromfile(stream, "<i8", sequences)
            firsts_D = np.fromfile(stream, "<i8", documents)
        if negative := np.flatnonzero(lengths_N < 0).tolist():
            raise UserError(f"{index.name}: sequence {negative[0]} has {lengths_N[negative[0]]} tokens; it is damaged")
        ends_N = np.cumsum(lengths_N)
        if wrong := np.flatnonzero(pointers_N != (ends_N - lengths_N) * dtype.itemsize).tolist():
            row = wrong[0]
            raise UserError(
                f"{index.name}: sequence {row} begins at byte {pointers_N[row]} of {array.name} by its pointer, but at "
                f"{(ends_N - lengths_N)[row] * dtype.itemsize} by the lengths of those before it; it is damaged"
            )
        total = int(ends_N[-1]) if sequences else 0
        if total != array.count:
            row = int(np.searchsorted(ends_N, array.count, side="right"))
            raise UserError(
                f"{array.name} holds {array.count} tokens, but {index.name} lists {total}"
                + (f": sequence {row} ends beyond the file" if total > array.count else "")
                + "; they are not of one data set, or one was cut short"
            )
        if documents < 1 or firsts_D[0] != 0 or firsts_D[-1] != sequences or (np.diff(firsts_D) < 0).any():
            raise UserError(f"{index.name}: its list of documents does not go from sequence 0 to {sequences}")
        ends_D = np.concatenate([[0], ends_N])[firsts_D[1:]]
        return ends_D.astype(np.int64)


def _read_header(index: File) -> tuple[np.dtype, int, int]:
    """Returns the dtype of the tokens, the number of sequences, and the number of documents plus one."""
    with open(index.url, "rb") as stream:
        content = stream.read(_HEADER.size)
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise UserError(f"{index.name} is no index of Megatron, or was cut short")
    _, version, code, sequences, documents = _HEADER.unpack(content)
    if version != 1 or code not in _DTYPES:
        raise UserError(f"{index.name} has version {version} and tokens of type {code}; version 1 of integers is read")
    expected_size = _HEADER.size + sequences * 12 + documents * 8
    if index.size != expected_size:
        raise UserError(
            f"{index.name} has {index.size} bytes, but {sequences} sequences in {documents - 1} documents need "
            f"{expected_size}; it was cut short, or is of several modalities, which are not read"
        )
    return np.dtype(_DTYPES[code]), sequences, documents
