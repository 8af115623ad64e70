"""ArrayRecord files, Grain's native format of byte records with random access."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, make_bad_row, read_record
from lm_trainer.data.sources.files import File, damage_error, group_files

if TYPE_CHECKING:
    from array_record.python.array_record_module import ArrayRecordReader

_BLOCK_RECORDS = 1024


class ArrayRecordFiles(FileSource):
    """Local ArrayRecord files. Needs the package `array_record`, which comes with Grain on Linux."""

    type: Literal["array_record"] = "array_record"
    content: Literal["json", "text"] = "json"
    """Content of a record: a JSON object with the document under `data.text_key`, or UTF-8 text."""

    suffixes: ClassVar[tuple[str, ...]] = (".array_record", ".arrayrecord")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        if fields and self.content == "text":
            raise UserError("data.source.content: text has no fields, which data.format reads; set content: json")
        for file in files:
            if file.path is None or file.compressed:
                raise UserError(f"{file.name}: ArrayRecord files are read on this machine, and not compressed again")
        return [ArrayRecordShard(run, text_key, fields, content=self.content) for run in group_files(files)]


@dataclass(frozen=True)
class ArrayRecordShard(FileShard):
    """One or more files, in order. Each row is a record."""

    content: Literal["json", "text"] = field(kw_only=True)

    def reader_identity(self) -> dict[str, object]:
        return {"type": "array_record", "content": self.content}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        file_start = 0
        for file in self.files:
            reader, count = _open_reader(file)
            for first in range(max(start - file_start, 0), count, _BLOCK_RECORDS):
                for index, content in enumerate(_read_records(file, reader, first, count), first):
                    row = self._to_row(content)
                    yield row._replace(number=file_start + index, where=f"{file.name}:{index + 1}")
            file_start += count

    def _to_row(self, content: bytes) -> Row | BadRow:
        try:
            text = content.decode("utf-8")
            return Row(0, "", text) if self.content == "text" else self._read_record(json.loads(text))
        except UnicodeDecodeError as error:
            return make_bad_row(
                f"invalid UTF-8 at byte {error.start}, near {content[max(0, error.start - 8) :][:16]!r}"
            )
        except (ValueError, RecursionError) as error:
            return make_bad_row(f"not JSON ({error}): {content[:60]!r}; for plain text, set data.source.content: text")

    def _read_record(self, value: object) -> Row | BadRow:
        return read_record(value, self.text_key, self.fields)


def _open_reader(file: File) -> tuple[ArrayRecordReader, int]:
    """Opens a file, and returns its reader and the number of its records."""
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise UserError(f"cannot read {file.url}: it needs a package; run: pip install array_record") from None
    try:
        reader = ArrayRecordReader(file.path)
        count = reader.num_records()
        if not reader.ok():
            # `close` raises the error of an unreadable file.
            reader.close()
        return reader, count
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{file.url} is truncated or damaged, or no ArrayRecord file: {error}") from None


def _read_records(file: File, reader: ArrayRecordReader, first: int, count: int) -> list[bytes]:
    try:
        return reader.read(first, min(first + _BLOCK_RECORDS, count))
    except (RuntimeError, ValueError, OSError, IndexError) as error:
        raise damage_error(file, error) from None
