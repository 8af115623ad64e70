"""Base classes of sources.

A source is a list of shards of numbered rows, identical on every machine and in every run.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.compression import file_suffix
from lm_trainer.data.sources.fields import MISSING, field_names, get_field, is_template, record_text
from lm_trainer.data.sources.files import File
from lm_trainer.data.sources.urls import list_files

Split = Literal["train", "validation"]

ALL_FIELDS: Final = ("*",)
"""The value of `fields` for which a row has all fields of its record."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class Row(NamedTuple):
    """A document, or a piece of a document that is too large to be encoded at once."""

    number: int
    """Index of the physical row in the shard, from 0. Empty and bad rows count, so that a build can resume here."""
    where: str
    """`file` or `file:line`, for error messages."""
    text: str
    ends_document: bool = True
    record: Mapping[str, Any] | None = None
    """The requested fields, if the format reads more than text. In this case, `text` is empty."""


class BadRow(NamedTuple):
    """A row that cannot be used."""

    number: int
    where: str
    reason: str
    ends_document: bool = True


class Shard(Protocol):
    """A part of a source, which one process reads from its first to its last row. Picklable."""

    @property
    def size(self) -> int:
        """Number of stored bytes, which is the compressed size for compressed files."""
        ...

    @property
    def text_size(self) -> int | None:
        """Number of bytes of text; None if it is unknown until the text is read (compressed files)."""
        ...

    def identity(self) -> dict[str, Any]:
        """Returns JSON that changes whenever the rows may have changed."""
        ...

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        """Yields the rows, starting with row number `start`.

        Raises:
            UserError: if a file has vanished, is damaged (for example a truncated gzip), or cannot be opened.
        """
        ...


class SourceConfig(Config):
    """Base of every member of the union of sources."""

    takes_urls: ClassVar[bool] = True
    """True if the source reads `data.train_urls` and `data.validation_urls`."""
    has_fields: ClassVar[bool] = True
    """True if the rows of the source are records, so that a format can read several fields."""

    @abstractmethod
    def shards(
        self, split: Split, urls: Sequence[str], text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        """Lists the shards of one split in a fixed order; [] if the source has no such split.

        Args:
            split: the split.
            urls: paths or URLs of the files, for sources that read files.
            text_key: name of the record field with the document, or a template with several fields. See `fields.py`.
            fields: if not empty, rows have these fields of each record, and no text.

        Raises:
            UserError: if files are missing or the source is empty.
        """


class FileSource(SourceConfig):
    """Base of sources that read the files in `data.train_urls` and `data.validation_urls`."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """File name endings, without a compression suffix, that select this source if the configuration names no source."""
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
        """Lists the shards of existing files, in order. See `shards` for the other arguments."""


@dataclass(frozen=True)
class FileShard(ABC):
    """Base of shards whose rows are the records of one or more files, in order."""

    files: tuple[File, ...]
    text_key: str
    fields: tuple[str, ...] = ()

    @property
    def read_fields(self) -> tuple[str, ...]:
        """The fields to read from a record."""
        return self.fields or field_names(self.text_key)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int | None:
        return None

    @abstractmethod
    def reader_identity(self) -> dict[str, object]:
        """Returns JSON of everything that determines the records, except the files; at least the source `type`."""

    def identity(self) -> dict[str, object]:
        keys = {"fields": list(self.fields)} if self.fields else {"text_key": self.text_key}
        return {**self.reader_identity(), **keys, "files": [file.identity() for file in self.files]}

    @abstractmethod
    def rows(self, start: int = 0) -> Iterator[Row | BadRow]: ...


def refuse_archive(file: File, split: Split, *, reads_archives: bool) -> None:
    """Raises `UserError` for a tar archive if the source does not read archives."""
    if file_suffix(file.url) == ".tar" and not reads_archives:
        raise UserError(
            f"data.{split}_urls: {file.name} is packed as .tar, which is not read but for recordings, by "
            "data.format: {type: audio}, and samples, by data.source: {type: webdataset}; unpack it"
        )


def read_record(value: object, text_key: str, fields: tuple[str, ...]) -> Row | BadRow:
    """Converts a record to a row without a location. See `SourceConfig.shards` for the arguments."""
    if fields == ALL_FIELDS and isinstance(value, Mapping):
        return Row(0, "", "", record=value)
    required = fields or field_names(text_key)
    if not isinstance(value, Mapping):
        names = " and ".join(repr(name) for name in required)
        return make_bad_row(f"expected an object with the field {names}, found {json_type_name(value)}")
    values = {name: get_field(value, name) for name in required}
    key = "data.format" if fields else "data.text_template" if is_template(text_key) else "data.text_key"
    for name in required:
        if values[name] is MISSING:
            known_names = ", ".join(sorted(map(str, value))[:8]) or "none"
            hint = _preference_hint(value, name) or f"{key} names the field to read"
            return make_bad_row(f"no field {name!r} (fields: {known_names}); {hint}")
    if fields:
        return Row(0, "", "", record=values)
    for name, part in values.items():
        if not isinstance(part, str):
            return make_bad_row(f"the field {name!r} is {json_type_name(part)}, not a string")
    return Row(0, "", record_text(value, text_key))


def _preference_hint(record: Mapping[str, object], missing: str) -> str | None:
    """Returns what to write for a record of preferences that is read by another format; None for other records."""
    if {"chosen", "rejected"} <= record.keys():
        if missing == "prompt":
            return "data.format.prompt_field: null takes the prompt from the common beginning of chosen and rejected"
        return "pairs of answers are read by data.format: {type: preference}, and trained on by loss: {type: dpo}"
    if {"completion", "label"} <= record.keys() and missing != "prompt":
        return (
            "labelled answers are read by data.format: {type: unpaired_preference}, and trained on by loss: {type: kto}"
        )
    return None


def full_text(row: Row) -> str:
    """Returns the text of a row, or the joined text of all fields of its record."""
    return row.text or "\n".join(_iter_strings(row.record))


def _iter_strings(value: object) -> Iterator[str]:
    """Yields every string in a record, in order."""
    # Not recursive, because JSON may be nested deeper than Python's recursion limit.
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list):
            left += reversed(list(value.values()) if isinstance(value, Mapping) else value)


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, which JSON can represent but UTF-8 cannot, by U+FFFD.

    Returns `text` itself if it has no surrogates.
    """
    # Encoding is the fastest test, and nearly all text passes it.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def make_bad_row(reason: str) -> BadRow:
    """Makes a bad row, whose number and location are filled in later."""
    return BadRow(0, "", reason)


def json_type_name(value: object) -> str:
    """Names the type of a value in JSON terms."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    names |= {bytes: "bytes", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
