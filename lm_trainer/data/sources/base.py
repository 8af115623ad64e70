"""Base of sources: numbered shards of numbered rows, the same on every machine and at every start."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.compression import suffix
from lm_trainer.data.sources.fields import MISSING, is_template, lookup, names_of, text_of
from lm_trainer.data.sources.files import File
from lm_trainer.data.sources.urls import list_files

Split = Literal["train", "validation"]

_SURROGATE = re.compile("[\ud800-\udfff]")


class Row(NamedTuple):
    """A document, or a piece of one that is too large to be encoded at once."""

    number: int
    """Counts every physical row of the shard from 0, empty and bad ones too, so that a build can resume at a row."""
    where: str
    """`file` or `file:line`, for error messages."""
    text: str
    ends_document: bool = True
    record: Mapping[str, Any] | None = None
    """The fields that were asked for, where the format reads more than text; `text` is empty then."""


class BadRow(NamedTuple):
    """A row that cannot be read as text."""

    number: int
    where: str
    reason: str
    ends_document: bool = True


class Shard(Protocol):
    """Part of a source that one process reads from its first to its last row. Picklable."""

    @property
    def size(self) -> int:
        """Stored bytes, compressed where the files are."""
        ...

    @property
    def text_size(self) -> int | None:
        """Bytes of text; None where only reading tells (compressed files)."""
        ...

    def identity(self) -> dict[str, Any]:
        """Returns JSON that changes whenever the rows may have changed."""
        ...

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        """Yields the rows from number `start` on.

        Raises:
            UserError: if a file vanished, is damaged (a truncated gzip), or cannot be opened.
        """
        ...


class SourceConfig(Config):
    """Base of every member of the union of sources."""

    takes_urls: ClassVar[bool] = True
    """True if the source reads `data.train_urls` and `data.validation_urls`."""
    has_fields: ClassVar[bool] = True
    """True if its rows are records, of which a format can ask for several fields."""

    @abstractmethod
    def shards(
        self, split: Split, urls: Sequence[str], text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        """Lists the shards of one split in their fixed order; [] where the source has no such split.

        Args:
            split: the split.
            urls: the files, for sources that take them.
            text_key: the field of a record that is the document, or a template of several: see `fields.py`.
            fields: if any, rows carry these fields of each record, and no text.

        Raises:
            UserError: if files are missing or the source has nothing to give.
        """


class FileSource(SourceConfig):
    """Base of the sources that read files named by `data.train_urls` and `data.validation_urls`."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Endings of files, without a compression suffix, that are read by this source when none is named."""
    reads_archives: ClassVar[bool] = False
    """True if files may be tar archives."""

    def shards(
        self, split: Split, urls: Sequence[str], text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        files = list_files(urls, f"data.{split}_urls")
        for file in files:
            refuse_archive(file, split, reads_archives=self.reads_archives)
        return self.shards_of_files(files, text_key, fields)

    @abstractmethod
    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        """Lists the shards of files that exist, in their order; see `shards` for the other arguments."""


@dataclass(frozen=True)
class FileShard(ABC):
    """Base of shards of records that stand in some files, in order."""

    files: tuple[File, ...]
    text_key: str
    fields: tuple[str, ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The fields of a record that are read."""
        return self.fields or names_of(self.text_key)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int | None:
        return None

    @abstractmethod
    def form(self) -> dict[str, Any]:
        """Returns JSON of all that decides the records, but for the files: at least the `type` of the source."""

    def identity(self) -> dict[str, Any]:
        what = {"fields": list(self.fields)} if self.fields else {"text_key": self.text_key}
        return {**self.form(), **what, "files": [file.identity() for file in self.files]}

    @abstractmethod
    def rows(self, start: int = 0) -> Iterator[Row | BadRow]: ...


def refuse_archive(file: File, split: Split, *, reads_archives: bool) -> None:
    """Raises `UserError` for a tar archive where none is read."""
    if suffix(file.url) == ".tar" and not reads_archives:
        raise UserError(
            f"data.{split}_urls: {file.name} is packed as .tar, which is not read but for recordings, by "
            "data.format: {type: audio}, and samples, by data.source: {type: webdataset}; unpack it"
        )


def read_record(value: Any, text_key: str, fields: tuple[str, ...]) -> Row | BadRow:
    """Makes a row, still without its place, of a record; see `SourceConfig.shards` for the arguments."""
    wanted = fields or names_of(text_key)
    if not isinstance(value, Mapping):
        names = " and ".join(repr(name) for name in wanted)
        return bad(f"expected an object with the field {names}, found {kind_of(value)}")
    found = {name: lookup(value, name) for name in wanted}
    key = "data.format" if fields else "data.text_template" if is_template(text_key) else "data.text_key"
    for name in wanted:
        if found[name] is MISSING:
            known = ", ".join(sorted(map(str, value))[:8]) or "none"
            pairs = {"chosen", "rejected"} <= value.keys()
            instead = "preference pairs (DPO) are not trained on" if pairs else f"{key} names the field to read"
            return bad(f"no field {name!r} (fields: {known}); {instead}")
    if fields:
        return Row(0, "", "", record=found)
    for name, part in found.items():
        if not isinstance(part, str):
            return bad(f"the field {name!r} is {kind_of(part)}, not a string")
    return Row(0, "", text_of(value, text_key))


def all_text(row: Row) -> str:
    """Returns the text of a row, or all text in the fields of its record, one after another."""
    return row.text or "\n".join(_strings(row.record))


def _strings(value: Any) -> Iterator[str]:
    """Yields every string in a record, in order."""
    # No recursion: JSON may be nested more deeply than functions may call themselves.
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list):
            left += reversed(list(value.values()) if isinstance(value, Mapping) else value)


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON can carry but UTF-8 cannot, by U+FFFD.

    Returns `text` itself if it has none.
    """
    # Encoding is the quickest test: nearly all text passes it.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def bad(reason: str) -> BadRow:
    """Makes a bad row whose place is still to be filled in."""
    return BadRow(0, "", reason)


def kind_of(value: Any) -> str:
    """Names the kind of a value in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    names |= {bytes: "bytes", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
