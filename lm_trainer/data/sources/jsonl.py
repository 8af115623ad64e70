"""JSON files, which have one object per line or one array of objects."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import IO, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileShard, FileSource, Row, Shard, make_bad_row, read_record
from lm_trainer.data.sources.compression import file_suffix
from lm_trainer.data.sources.fields import record_text
from lm_trainer.data.sources.files import File, group_files, number_items, open_binary, total_text_size

_BLOCK_BYTES = 1 << 20

_BOM = b"\xef\xbb\xbf"

_COMMON_DEPTH = 256
"""Depth of nesting that both decoders can read. Beyond it, their limits differ."""


class JsonLines(FileSource):
    """Files with one JSON object per line. The document is in the field `data.text_key`.

    A `.json` file may also be a single array of such objects, which is loaded into memory.
    """

    type: Literal["jsonl"] = "jsonl"

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".ndjson")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        return [JsonShard(run, text_key, fields) for run in group_files(files)]


class JsonShard(FileShard):
    """One or more files, in order. Each row is a line, or an item of an array."""

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def reader_identity(self) -> dict[str, object]:
        return {"type": "jsonl"}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, (location, item) in number_items((_iter_items(file) for file in self.files), start):
            if isinstance(item, bytes) and (text := self._decode_text_fast(item)) is not None:
                yield Row(number, location, text)
            else:
                yield self._to_row(item)._replace(number=number, where=location)

    def _decode_text_fast(self, line: bytes) -> str | None:
        """Returns the text of a line with the faster decoder; None if the line needs `_to_row`."""
        # The set of bad rows must not depend on the installed packages. With `fields`, all values matter, and the
        # decoders differ for integers of more than 64 bits.
        if self.fields or (decode := _fast_decoder()) is None:
            return None
        try:
            value = decode(line)
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        text = value.get(self.text_key)
        if not isinstance(text, str) and not isinstance(text := record_text(value, self.text_key), str):
            return None
        # The decoders differ in their nesting limits. The number of brackets is an upper bound of the nesting.
        for item in value.values():
            if isinstance(item, list | dict) and line.count(b"[") + line.count(b"{") > _COMMON_DEPTH:
                return None
        return text

    def _to_row(self, item: object) -> Row | BadRow:
        if not isinstance(item, bytes):
            return read_record(item, self.text_key, self.fields)
        # An empty line counts as an empty row.
        if not item.strip():
            return Row(0, "", "")
        try:
            value = json.loads(item.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return make_bad_row(
                f"invalid UTF-8 at byte {error.start} of the line, near {item[max(0, error.start - 8) :][:16]!r}"
            )
        except json.JSONDecodeError as error:
            if item.strip() in (b"{", b"["):
                return make_bad_row(
                    "a bracket alone: the file holds neither a whole object on each line nor, in a file named .json, "
                    "an array of them; write one object per line"
                )
            return make_bad_row(
                f"not JSON ({error.msg} at column {error.colno}): {item[:60].decode('utf-8', 'replace')!r}"
            )
        except ValueError:  # Python limits the length of integers as text
            return make_bad_row("JSON with a number of several thousand digits")
        except RecursionError:
            return make_bad_row("JSON nested too deeply")
        return read_record(value, self.text_key, self.fields)


@lru_cache(maxsize=1)
def _fast_decoder() -> Callable[[bytes], object] | None:
    """Returns the decoder of orjson, if it is installed. It is twice as fast as `json`, but rejects more lines."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads


def _iter_items(file: File) -> Iterator[tuple[str, object]]:
    """Yields (location, line as bytes), or (location, item) for a file with an array."""
    name = file.name
    with open_binary(file) as stream:
        # Blank lines before an array are skipped. Before a JSON line, they are separate rows.
        begin = [stream.readline()]
        while begin[-1] and not begin[-1].removeprefix(_BOM).strip():
            begin.append(stream.readline())
        if file_suffix(file.url) == ".json" and begin[-1].removeprefix(_BOM).lstrip()[:1] == b"[":
            yield from _iter_array(file, b"".join(begin) + stream.read())
        else:
            lines = itertools.chain((line for line in begin if line), _iter_lines(stream))
            yield from ((f"{name}:{number}", line) for number, line in enumerate(lines, start=1))


def _iter_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file, including all lines before a damaged position."""
    # Iterating over the stream would read ahead, and an error would lose the lines read so far.
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


def _iter_array(file: File, content: bytes) -> Iterator[tuple[str, object]]:
    try:
        items = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.url} begins like an array of JSON objects, but is none: {error}") from None
    for number, item in enumerate(items):
        yield f"{file.name}[{number}]", item
