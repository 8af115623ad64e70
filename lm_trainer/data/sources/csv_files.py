"""CSV and TSV files. Each row is a record, and the first row names the fields."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, make_bad_row, read_record
from lm_trainer.data.sources.compression import file_suffix
from lm_trainer.data.sources.files import File, group_files, number_items, open_binary, total_text_size

# Surrogates for invalid UTF-8 bytes, from Python's `surrogateescape` error handler.
_NO_UTF8 = re.compile("[\udc80-\udcff]")


class CsvFiles(FileSource):
    """CSV and TSV files in UTF-8. The document is in the column `data.text_key`.

    A quoted field may contain separators, line ends and doubled quotes.
    """

    type: Literal["csv"] = "csv"
    delimiter: str | None = None
    """The character between fields. By default, it is a tab for `.tsv` files, and a comma for others."""
    columns: list[str] | None = None
    """Names of the columns, for files that have no header row."""
    quotes: bool = True
    """False for files in which `"` is an ordinary character."""

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter: expected one character, got {self.delimiter!r}")
        return self

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [CsvShard(run, text_key, fields, dialect=self) for run in group_files(files)]


@dataclass(frozen=True)
class CsvShard(FileShard):
    """One or more files, in order. Each row is a record."""

    dialect: CsvFiles = field(kw_only=True)

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def reader_identity(self) -> dict[str, object]:
        return self.dialect.model_dump()

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        files = (self._iter_records(file) for file in self.files)
        for number, (location, record) in number_items(files, start):
            row = record if isinstance(record, BadRow) else self._to_row(record)
            yield row._replace(number=number, where=location)

    def _to_row(self, record: dict[str, str]) -> Row | BadRow:
        row = read_record(record, self.text_key, self.fields)
        read = "".join((row.record or {}).values()) + row.text if isinstance(row, Row) else ""
        # The regular expression runs only on non-ASCII text, which includes any text with an invalid byte.
        if not read.isascii() and _NO_UTF8.search(read):
            return make_bad_row("invalid UTF-8")
        return row

    def _iter_records(self, file: File) -> Iterator[tuple[str, dict[str, str] | BadRow]]:
        """Yields (file and line, record) for every record."""
        for line, fields, columns in self._iter_lines(file):
            location = f"{file.name}:{line}"
            if isinstance(fields, BadRow):
                yield location, fields
            elif len(fields) != len(columns):
                yield location, make_bad_row(f"{len(fields)} fields, but there are {len(columns)} columns")
            else:
                yield location, dict(zip(columns, fields, strict=True))

    def _iter_lines(self, file: File) -> Iterator[tuple[int, list[str] | BadRow, list[str]]]:
        """Yields (first line of a record, its fields, the column names)."""
        # Documents may be larger than Python's default field limit.
        csv.field_size_limit(sys.maxsize)
        dialect, columns = self.dialect, self.dialect.columns
        delimiter = dialect.delimiter or ("\t" if file_suffix(file.url) == ".tsv" else ",")
        quoting = csv.QUOTE_MINIMAL if dialect.quotes else csv.QUOTE_NONE
        with open_binary(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            reader = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
            while True:
                line = reader.line_num + 1
                try:
                    fields: list[str] | BadRow = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    fields = make_bad_row(f"not CSV: {error}")
                if columns is None:
                    if isinstance(fields, BadRow) or len(set(fields)) < len(fields):
                        raise UserError(
                            f"{file.url}: its first row does not name the columns, each once; name them in "
                            "data.source.columns"
                        )
                    columns = fields
                elif fields:
                    yield line, fields, columns
