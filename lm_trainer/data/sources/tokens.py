"""Base of sources of tokens: files of ids that are trained on as they are, and only indexed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileSource, Row, Shard
from lm_trainer.data.sources.files import File

DocumentEnds = Literal["eos", "index"]


class TokenArray(NamedTuple):
    """Ids of one file, one after another."""

    name: str
    """For messages."""
    path: str
    kind: str
    """As of `TokenPlace`."""
    dtype: str
    header: int
    count: int


class TokenShard(ABC):
    """All files of a split, in their order; a row is a token, since files may have no other index.

    They are one shard because a document that no token ended goes on in the next file.
    """

    by_index: bool = False
    """True if documents end where an index says so, whatever token stands there."""

    @abstractmethod
    def arrays(self, dtype: np.dtype) -> list[TokenArray]:
        """Lists the files.

        Args:
            dtype: of the ids where a file does not tell.

        Raises:
            UserError: if one is not what it should be.
        """

    def ends(self, number: int, array: TokenArray) -> np.ndarray | None:
        """Returns where the documents of file `number` end: int64, rising, the last is its length; None: no index.

        Raises:
            UserError: if the index does not fit the tokens.
        """
        del number, array

    def misread(self, ids_T: np.ndarray, header: int, vocab_size: int, eos_id: int) -> str | None:
        """Says why ids are certainly of another type than they are read in, and what to write; None where they may not.

        Args:
            ids_T: integers [T], those of one part.
            header: bytes before the first id of the file.
            vocab_size: ids of the tokenizer.
            eos_id: the end-of-document token.
        """
        del ids_T, header, vocab_size, eos_id

    @abstractmethod
    def check_unchanged(self) -> None:
        """Looks at the files again.

        Raises:
            UserError: if one is not as it was.
        """

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def text_size(self) -> int | None:
        return self.size

    @abstractmethod
    def identity(self) -> dict[str, Any]: ...

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        """Yields one row without text, which says where token `start` of the shard stands."""
        left = start
        for array in self.arrays(np.dtype("<u2")):
            if left < array.count:
                yield Row(start, f"{array.name}:token {left}", "")
                return
            left -= array.count


class TokenFileSource(FileSource):
    """Base of the sources of token files that `data.train_urls` names."""

    has_fields: ClassVar[bool] = False

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        del text_key, fields
        for file in files:
            if file.path is None:
                raise UserError(f"{file.name} is not on this machine; tokens are memory-mapped, so copy it here")
            if file.compressed:
                raise UserError(f"{file.name} is compressed; tokens are memory-mapped, so unpack it")
        return [self.token_shard(tuple(files))]

    @abstractmethod
    def token_shard(self, files: tuple[File, ...]) -> TokenShard:
        """Returns the shard of some files of this machine."""


def check_files(files: Sequence[File]) -> None:
    """Looks at files again.

    Raises:
        UserError: if one has another size or time than before.
    """
    for file in files:
        if (now := file.now()) != file:
            raise UserError(
                f"{file.name} changed while it was indexed: it had {file.size} bytes (version {file.version}), now "
                f"{now.size} (version {now.version}); start again when nothing writes to it any more"
            )


def local_path(file: File) -> str:
    """Returns the absolute path of a file of this machine."""
    assert file.path is not None
    return file.path


def count_tokens(file: File, header: int, dtype: np.dtype) -> int:
    """Counts the ids in a file.

    Raises:
        UserError: if its size is no whole number of them.
    """
    count, rest = divmod(file.size - header, dtype.itemsize)
    if rest or count < 0:
        raise UserError(
            f"{file.name} has {file.size} bytes, which are no whole number of {dtype.name} tokens"
            + (f" after a header of {header} bytes" if header else "")
            + "; it was cut short, or data.source.dtype is another"
        )
    return count
