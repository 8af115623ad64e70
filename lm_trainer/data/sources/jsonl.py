"""JSON lines: one object per line, its text under one key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split
from lm_trainer.data.sources.urls import File, group, list_files, numbered, open_binary, total_text_size


class JsonLines(SourceConfig):
    """Files with one JSON object per line; the document stands under `data.text_key`."""

    type: Literal["jsonl"] = "jsonl"

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".ndjson")

    def shards(self, split: Split, urls: Sequence[str], text_key: str) -> list[Shard]:
        return [JsonShard(files, text_key) for files in group(list_files(urls, f"data.{split}_urls"))]


@dataclass(frozen=True)
class JsonShard:
    """Some files, in order; a row is a line."""

    files: tuple[File, ...]
    text_key: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def identity(self) -> dict[str, Any]:
        return {"type": "jsonl", "text_key": self.text_key, "files": [file.identity() for file in self.files]}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, (where, line) in numbered((_lines(file) for file in self.files), start):
            text = self._text(line)
            if isinstance(text, BadRow):
                yield text._replace(number=number, where=where)
            else:
                yield Row(number, where, text)

    def _text(self, line: bytes) -> str | BadRow:
        if not line.strip():
            return ""
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return _bad(
                f"invalid UTF-8 at byte {error.start} of the line, near {line[max(0, error.start - 8) :][:16]!r}"
            )
        except json.JSONDecodeError as error:
            return _bad(f"not JSON ({error.msg} at column {error.colno}): {line[:60].decode('utf-8', 'replace')!r}")
        except RecursionError:
            return _bad("JSON nested too deeply")
        if not isinstance(value, dict):
            return _bad(f"expected a JSON object with the field {self.text_key!r}, found {_kind(value)}")
        if self.text_key not in value:
            known = ", ".join(sorted(value)[:8]) or "none"
            return _bad(f"no field {self.text_key!r} (fields: {known}); data.text_key names the field to read")
        text = value[self.text_key]
        return text if isinstance(text, str) else _bad(f"the field {self.text_key!r} is {_kind(text)}, not a string")


def _lines(file: File) -> Iterator[tuple[str, bytes]]:
    with open_binary(file) as stream:
        for number, line in enumerate(stream, start=1):
            yield f"{file.url}:{number}", line


def _bad(reason: str) -> BadRow:
    return BadRow(0, "", reason)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
