"""Plain text files: one file is one document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileSource, Row, Shard
from lm_trainer.data.sources.files import File, group, numbered, open_binary, total_text_size

PIECE_BYTES = 1 << 20
"""A longer file is encoded in pieces of about this size, so that memory stays bounded; it is still one document.

Part of the identity of a shard, since tokens may differ where a file is cut.
"""

# Several pieces, so that the rest of a buffer is moved to its front only once in a while.
_BUFFER_BYTES = 8 * PIECE_BYTES

_BOM = b"\xef\xbb\xbf"
_LINE_START = re.compile(rb"\n(?=[^\s])")


class TextFiles(FileSource):
    """Text files in UTF-8, each one document."""

    type: Literal["text"] = "text"

    has_fields: ClassVar[bool] = False
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".js")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        del text_key, fields
        return [TextShard(run) for run in group(files)]


@dataclass(frozen=True)
class TextShard:
    """Some files, in order; a row is a file or, of a large file, a piece."""

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def identity(self) -> dict[str, Any]:
        return {"type": "text", "piece_bytes": PIECE_BYTES, "files": [file.identity() for file in self.files]}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        # One buffer for all files of the shard: in new ones, every page would be touched for the first time again.
        buffer = bytearray(_BUFFER_BYTES)
        for number, (file, place, piece, last) in numbered((_pieces(file, buffer) for file in self.files), start):
            try:
                yield Row(number, file.name, str(piece, "utf-8"), last)
            except UnicodeDecodeError as error:
                line = _line(file, place + error.start)
                near = bytes(piece[max(0, error.start - 8) : error.start + 8])
                # A bad piece ends the document: the text after the gap does not go on from the text before it.
                yield BadRow(number, f"{file.name}:{line}", f"invalid UTF-8 near {near!r}")


def _pieces(file: File, buffer: bytearray) -> Iterator[tuple[File, int, memoryview, bool]]:
    """Yields (file, place of the first byte in it, bytes, whether it is the last piece).

    The bytes lie in `buffer`, until the next piece is asked for.
    """
    view = memoryview(buffer)
    with open_binary(file) as stream:
        end = _fill(stream, view)
        start = place = len(_BOM) if buffer.startswith(_BOM, 0, end) else 0
        if buffer.find(b"\0", start, min(end, start + 1024)) >= 0:
            raise UserError(f"{file.url} is not text: it holds zero bytes (is it binary, compressed or UTF-16?)")
        # A piece is cut only while more than two pieces lie ready: the search for its end must not run past the bytes
        # that were read.
        while True:
            if end - start <= 2 * PIECE_BYTES:
                view[: end - start] = view[start:end]
                start, end = 0, end - start
                end += _fill(stream, view[end:])
            if end - start <= 2 * PIECE_BYTES:
                yield file, place, view[start:end], True
                return
            cut = _cut(buffer, start)
            yield file, place, view[start:cut], False
            start, place = cut, place + cut - start


def _fill(stream: Any, view: memoryview) -> int:
    """Reads until the view is full or the file has ended, and returns the number of bytes."""
    # Remote files may give fewer bytes than they are asked for, without having ended.
    filled = 0
    while filled < len(view) and (count := stream.readinto(view[filled:])):
        filled += count
    return filled


def _cut(buffer: bytearray, start: int) -> int:
    """Finds the end of a piece: before a line that starts with text, so that few tokens could have crossed the cut."""
    least, most = start + PIECE_BYTES, start + 2 * PIECE_BYTES
    if match := _LINE_START.search(buffer, least, most):
        return match.end()
    # No such line: cut at the limit, but not inside a character. Its later bytes in UTF-8 begin with the bits 10.
    cut = most
    while cut > least and buffer[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _line(file: File, place: int) -> int:
    """Returns the line, counted from 1, of the byte at `place` of a file."""
    line = 1
    with open_binary(file) as stream:
        while place > 0 and (block := stream.read(min(place, PIECE_BYTES))):
            line += block.count(b"\n")
            place -= len(block)
    return line
