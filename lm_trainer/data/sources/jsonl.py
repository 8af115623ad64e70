"""JSON: one object per line, or files that are one array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, bad, read_record
from lm_trainer.data.sources.urls import File, group, list_files, numbered, open_binary, suffix, total_text_size


class JsonLines(SourceConfig):
    """Files with one JSON object per line; the document stands under `data.text_key`.

    A file whose name ends in `.json` may also be one array of such objects; it is then read at once.
    """

    type: Literal["jsonl"] = "jsonl"

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".ndjson")

    def shards(
        self, split: Split, urls: Sequence[str], text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        files = list_files(urls, f"data.{split}_urls")
        return [JsonShard(run, text_key, fields) for run in group(files)]


@dataclass(frozen=True)
class JsonShard:
    """Some files, in order; a row is a line, or an item of an array."""

    files: tuple[File, ...]
    text_key: str
    fields: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def identity(self) -> dict[str, Any]:
        what = {"fields": list(self.fields)} if self.fields else {"text_key": self.text_key}
        return {"type": "jsonl", **what, "files": [file.identity() for file in self.files]}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, (where, item) in numbered((_items(file) for file in self.files), start):
            row = self._row(item)
            yield row._replace(number=number, where=where)

    def _row(self, item: Any) -> Row | BadRow:
        if not isinstance(item, bytes):
            return read_record(item, self.text_key, self.fields)
        if not item.strip():
            return Row(0, "", "")
        try:
            value = json.loads(item.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return bad(
                f"invalid UTF-8 at byte {error.start} of the line, near {item[max(0, error.start - 8) :][:16]!r}"
            )
        except json.JSONDecodeError as error:
            return bad(f"not JSON ({error.msg} at column {error.colno}): {item[:60].decode('utf-8', 'replace')!r}")
        except RecursionError:
            return bad("JSON nested too deeply")
        return read_record(value, self.text_key, self.fields)


def _items(file: File) -> Iterator[tuple[str, Any]]:
    """Lines as bytes, or what a file's array holds."""
    with open_binary(file) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and suffix(file.url) == ".json" and line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                yield from _array(file, line + stream.read())
                return
            yield f"{file.name}:{number}", line


def _array(file: File, content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.url} begins like an array of JSON objects, but is none: {error}") from None
    for number, item in enumerate(items):
        yield f"{file.name}[{number}]", item
