"""JSON files: one object per line, or one array of objects."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import IO, Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, bad, read_record
from lm_trainer.data.sources.compression import suffix
from lm_trainer.data.sources.fields import text_of
from lm_trainer.data.sources.files import File, group, numbered, open_binary, total_text_size

_BLOCK_BYTES = 1 << 20

_BOM = b"\xef\xbb\xbf"

_CERTAIN_DEPTH = 256
"""Both decoders read what is nested less deeply; beyond, each has a limit of its own."""


class JsonLines(FileSource):
    """Files with one JSON object per line; the document stands under `data.text_key`.

    A file whose name ends in `.json` may also be one array of such objects; it is then read at once.
    """

    type: Literal["jsonl"] = "jsonl"

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".ndjson")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [JsonShard(run, text_key, fields) for run in group(files)]


class JsonShard(FileShard):
    """Some files, in order; a row is a line, or an item of an array."""

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def form(self) -> dict[str, Any]:
        return {"type": "jsonl"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, (where, item) in numbered((_items(file) for file in self.files), start):
            if isinstance(item, bytes) and (text := self._quick_text(item)) is not None:
                yield Row(number, where, text)
            else:
                yield self._row(item)._replace(number=number, where=where)

    def _quick_text(self, line: bytes) -> str | None:
        """Returns the text of a line in which the faster decoder finds one; None where `_row` has to look."""
        # Which rows are bad must not depend on the packages that are installed. Of a record with other fields every
        # value counts, and the decoders differ in integers beyond 64 bits.
        if self.fields or (decode := _fast_decoder()) is None:
            return None
        try:
            value = decode(line)
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        text = value.get(self.text_key)
        if not isinstance(text, str) and not isinstance(text := text_of(value, self.text_key), str):
            return None
        # The decoders differ in how deeply they read. Brackets are counted, since they are at least as many as levels.
        for item in value.values():
            if isinstance(item, list | dict) and line.count(b"[") + line.count(b"{") > _CERTAIN_DEPTH:
                return None
        return text

    def _row(self, item: Any) -> Row | BadRow:
        if not isinstance(item, bytes):
            return read_record(item, self.text_key, self.fields)
        # An empty line is an empty row, which keeps its number.
        if not item.strip():
            return Row(0, "", "")
        try:
            value = json.loads(item.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return bad(
                f"invalid UTF-8 at byte {error.start} of the line, near {item[max(0, error.start - 8) :][:16]!r}"
            )
        except json.JSONDecodeError as error:
            if item.strip() in (b"{", b"["):
                return bad(
                    "a bracket alone: the file holds neither a whole object on each line nor, in a file named .json, "
                    "an array of them; write one object per line"
                )
            return bad(f"not JSON ({error.msg} at column {error.colno}): {item[:60].decode('utf-8', 'replace')!r}")
        except ValueError:  # Python's limit for integers as text
            return bad("JSON with a number of several thousand digits")
        except RecursionError:
            return bad("JSON nested too deeply")
        return read_record(value, self.text_key, self.fields)


@lru_cache(maxsize=1)
def _fast_decoder() -> Callable[[bytes], Any] | None:
    """Returns orjson's decoder, where it is installed: twice as fast as `json`, and refuses more lines than it does."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads


def _items(file: File) -> Iterator[tuple[str, Any]]:
    """Yields (place, line as bytes), or (place, item) for a file that is an array."""
    name = file.name
    with open_binary(file) as stream:
        # Blank lines may come before an array; before a line of JSON they are rows of their own.
        begin = [stream.readline()]
        while begin[-1] and not begin[-1].removeprefix(_BOM).strip():
            begin.append(stream.readline())
        if suffix(file.url) == ".json" and begin[-1].removeprefix(_BOM).lstrip()[:1] == b"[":
            yield from _array(file, b"".join(begin) + stream.read())
        else:
            lines = itertools.chain((line for line in begin if line), _lines(stream))
            yield from ((f"{name}:{number}", line) for number, line in enumerate(lines, start=1))


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file, also all those before the place where it turns out to be damaged."""
    # Iterating over the stream itself reads ahead, and an error would lose the lines that it has read by then.
    read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
    begun: list[bytes] = []
    while block := read(_BLOCK_BYTES):
        for line in io.BytesIO(block):
            if not line.endswith(b"\n"):
                begun.append(line)
            elif begun:
                yield b"".join([*begun, line])
                begun = []
            else:
                yield line
    if begun:
        yield b"".join(begun)


def _array(file: File, content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.url} begins like an array of JSON objects, but is none: {error}") from None
    for number, item in enumerate(items):
        yield f"{file.name}[{number}]", item
