"""CSV and TSV files: a row is a record, whose fields the first row names."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, bad, read_record
from lm_trainer.data.sources.compression import suffix
from lm_trainer.data.sources.files import File, group, numbered, open_binary, total_text_size

# What Python makes of a byte that is not UTF-8, where it is asked to keep it.
_NO_UTF8 = re.compile("[\udc80-\udcff]")


class CsvFiles(FileSource):
    """CSV and TSV files in UTF-8; the document stands in the column `data.text_key`.

    Fields may be quoted, and hold separators, line ends and doubled quotes then.
    """

    type: Literal["csv"] = "csv"
    delimiter: str | None = None
    """The character between fields; by the ending of the file, if absent: a tab for `.tsv`, else a comma."""
    columns: list[str] | None = None
    """Names of the columns, for files without a first row that names them."""
    quotes: bool = True
    """False for files in which `"` is a character like any other."""

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter: expected one character, got {self.delimiter!r}")
        return self

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [CsvShard(run, text_key, fields, dialect=self) for run in group(files)]


@dataclass(frozen=True)
class CsvShard(FileShard):
    """Some files, in order; a row is a record."""

    dialect: CsvFiles = field(kw_only=True)

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def form(self) -> dict[str, Any]:
        return self.dialect.model_dump()

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        files = (self._records(file) for file in self.files)
        for number, (where, record) in numbered(files, start):
            row = record if isinstance(record, BadRow) else self._row(record)
            yield row._replace(number=number, where=where)

    def _row(self, record: dict[str, str]) -> Row | BadRow:
        row = read_record(record, self.text_key, self.fields)
        read = "".join((row.record or {}).values()) + row.text if isinstance(row, Row) else ""
        # Two passes only over text that is not ASCII, and a broken byte makes it so.
        if not read.isascii() and _NO_UTF8.search(read):
            return bad("invalid UTF-8")
        return row

    def _records(self, file: File) -> Iterator[tuple[str, dict[str, str] | BadRow]]:
        """Yields (file and line, record) for each."""
        for line, fields, columns in self._lines(file):
            where = f"{file.name}:{line}"
            if isinstance(fields, BadRow):
                yield where, fields
            elif len(fields) != len(columns):
                yield where, bad(f"{len(fields)} fields, but there are {len(columns)} columns")
            else:
                yield where, dict(zip(columns, fields, strict=True))

    def _lines(self, file: File) -> Iterator[tuple[int, list[str] | BadRow, list[str]]]:
        """Yields (the line with which a record begins, its fields, the names of the columns)."""
        # Python's limit for a field is less than a document may have.
        csv.field_size_limit(sys.maxsize)
        dialect, columns = self.dialect, self.dialect.columns
        delimiter = dialect.delimiter or ("\t" if suffix(file.url) == ".tsv" else ",")
        quoting = csv.QUOTE_MINIMAL if dialect.quotes else csv.QUOTE_NONE
        with open_binary(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            reader = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
            while True:
                line = reader.line_num + 1
                try:
                    fields: Any = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    fields = bad(f"not CSV: {error}")
                if columns is None:
                    if isinstance(fields, BadRow) or len(set(fields)) < len(fields):
                        raise UserError(
                            f"{file.url}: its first row does not name the columns, each once; name them in "
                            "data.source.columns"
                        )
                    columns = fields
                elif fields:
                    yield line, fields, columns
