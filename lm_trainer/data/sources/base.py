"""What a source is: numbered shards of numbered rows, the same on every machine and at every start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from lm_trainer.core.config import Config

Split = Literal["train", "validation"]


class Row(NamedTuple):
    """A document, or a piece of one that is too large to be encoded at once."""

    number: int
    """Counts every physical row of the shard from 0, empty and bad ones too, so that a build can resume at a row."""
    where: str
    """`file` or `file:line`, for error messages."""
    text: str
    ends_document: bool = True


class BadRow(NamedTuple):
    """A row that cannot be read as text."""

    number: int
    where: str
    reason: str
    ends_document: bool = True


class Shard(Protocol):
    """A part of a source that one worker reads from its first to its last row. Picklable."""

    @property
    def size(self) -> int:
        """Stored bytes, compressed where the files are."""
        ...

    @property
    def text_size(self) -> int | None:
        """Bytes of text, or None where only reading tells (compressed files)."""
        ...

    def identity(self) -> dict[str, Any]:
        """JSON that changes whenever the rows may have changed."""
        ...

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        """The rows from number `start` on.

        Raises:
            UserError: if a file vanished, is damaged (a truncated gzip), or cannot be opened.
        """
        ...


class SourceConfig(Config):
    """The base of every member of the union of sources."""

    takes_urls: ClassVar[bool] = True
    """Whether the source reads `data.train_urls` and `data.validation_urls`."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Names of files, without a compression suffix, that are read by this source when none is named."""

    def shards(self, split: Split, urls: Sequence[str], text_key: str) -> list[Shard]:
        """Lists the shards of one split in their fixed order; [] where the source has no such split.

        Raises:
            UserError: if files are missing or the source has nothing to give.
        """
        raise NotImplementedError
