"""Base class of token sources, whose files of ids are only indexed, not copied to the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileSource, Row, Shard
from lm_trainer.data.sources.files import File

DocumentEnds = Literal["eos", "index"]


class TokenArray(NamedTuple):
    """The consecutive ids of one file."""

    name: str
    """Name of the file, for messages."""
    path: str
    kind: str
    """See `TokenLocation`."""
    dtype: str
    header: int
    count: int


class TokenShard(ABC):
    """All files of a split, in order. Each row is a token, since files may not have any other index.

    All files form a single shard, since a document without an end-of-document token continues in the next file.
    """

    by_index: bool = False
    """True if an index defines the document ends, independently of the tokens."""

    @abstractmethod
    def token_arrays(self, dtype: np.dtype) -> list[TokenArray]:
        """Lists the files.

        Args:
            dtype: dtype of the ids, for files that do not define it.

        Raises:
            UserError: if a file is invalid.
        """

    def read_document_ends(self, number: int, array: TokenArray) -> np.ndarray | None:
        """Returns the document ends of file `number`: ascending int64 up to the file's length; None if it has no index.

        Raises:
            UserError: if the index does not fit the tokens.
        """
        del number, array

    def dtype_problem(self, ids_T: np.ndarray, header: int, vocab_size: int, eos_id: int) -> str | None:
        """Explains why the ids certainly have another dtype, and what to do; None if their dtype may be correct.

        Args:
            ids_T: integers [T], the ids of one part.
            header: number of bytes before the first id of the file.
            vocab_size: vocabulary size of the tokenizer.
            eos_id: the end-of-document token.
        """
        del ids_T, header, vocab_size, eos_id

    @abstractmethod
    def check_unchanged(self) -> None:
        """Checks that the files have not changed.

        Raises:
            UserError: if a file has changed.
        """

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def text_size(self) -> int | None:
        return self.size

    @abstractmethod
    def identity(self) -> dict[str, object]: ...

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        """Yields one row without text, which has the location of token `start` of the shard."""
        offset = start
        for array in self.token_arrays(np.dtype("<u2")):
            if offset < array.count:
                yield Row(start, f"{array.name}:token {offset}", "")
                return
            offset -= array.count


class TokenFileSource(FileSource):
    """Base of sources that read the token files listed in `data.train_urls`."""

    has_fields: ClassVar[bool] = False

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        del text_key, fields
        for file in files:
            if file.path is None:
                raise UserError(f"{file.name} is not on this machine; tokens are memory-mapped, so copy it here")
            if file.compressed:
                raise UserError(f"{file.name} is compressed; tokens are memory-mapped, so unpack it")
        return [self.make_token_shard(tuple(files))]

    @abstractmethod
    def make_token_shard(self, files: tuple[File, ...]) -> TokenShard:
        """Returns the shard of the given local files."""


def check_files_unchanged(files: Sequence[File]) -> None:
    """Checks that files have not changed.

    Raises:
        UserError: if the size or version of a file has changed.
    """
    for file in files:
        if (current := file.refresh()) != file:
            raise UserError(
                f"{file.name} changed while it was indexed: it had {file.size} bytes (version {file.version}), now "
                f"{current.size} (version {current.version}); start again when nothing writes to it any more"
            )


def require_local_path(file: File) -> str:
    """Returns the absolute path of a local file."""
    assert file.path is not None
    return file.path


def count_tokens(file: File, header: int, dtype: np.dtype) -> int:
    """Returns the number of ids in a file.

    Raises:
        UserError: if the file size is not a multiple of the id size.
    """
    count, remainder = divmod(file.size - header, dtype.itemsize)
    if remainder or count < 0:
        raise UserError(
            f"{file.name} has {file.size} bytes, which are no whole number of {dtype.name} tokens"
            + (f" after a header of {header} bytes" if header else "")
            + "; it was cut short, or data.source.dtype is another"
        )
    return count
