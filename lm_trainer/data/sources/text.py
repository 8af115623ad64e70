"""Plain text files, each of which is one document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, FileSource, Row, Shard
from lm_trainer.data.sources.files import File, group_files, number_items, open_binary, total_text_size

PIECE_BYTES = 1 << 20
"""Longer files are encoded in pieces of about this size to bound memory. The file is still one document.

The size is part of the identity of a shard, since tokens may differ at the boundary between two pieces.
"""

# The buffer holds several pieces, so that its remainder is rarely moved to its front.
_BUFFER_BYTES = 8 * PIECE_BYTES

_BOM = b"\xef\xbb\xbf"
_LINE_START = re.compile(rb"\n(?=[^\s])")


class TextFiles(FileSource):
    """UTF-8 text files, each of which is one document."""

    type: Literal["text"] = "text"

    has_fields: ClassVar[bool] = False
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".js")

    def shards_of_files(self, files: Sequence[File], text_key: str, fields: tuple[str, ...]) -> list[Shard]:
        del text_key, fields
        return [TextShard(run) for run in group_files(files)]


@dataclass(frozen=True)
class TextShard:
    """One or more files, in order. Each row is a file, or a piece of a large file."""

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int | None:
        return total_text_size(self.files)

    def identity(self) -> dict[str, object]:
        return {"type": "text", "piece_bytes": PIECE_BYTES, "files": [file.identity() for file in self.files]}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        # All files of the shard share one buffer, since a new buffer for every file would cause page faults every time.
        buffer = bytearray(_BUFFER_BYTES)
        for number, (file, offset, piece, last) in number_items(
            (_iter_pieces(file, buffer) for file in self.files), start
        ):
            try:
                yield Row(number, file.name, str(piece, "utf-8"), last)
            except UnicodeDecodeError as error:
                line = _line_number(file, offset + error.start)
                near = bytes(piece[max(0, error.start - 8) : error.start + 8])
                # A bad piece ends the document, since the text after the gap does not continue the text before it.
                yield BadRow(number, f"{file.name}:{line}", f"invalid UTF-8 near {near!r}")


def _iter_pieces(file: File, buffer: bytearray) -> Iterator[tuple[File, int, memoryview, bool]]:
    """Yields (file, offset of the first byte, bytes, True for the last piece of the file).

    The bytes are a view of `buffer`, and are valid until the next piece is requested.
    """
    view = memoryview(buffer)
    with open_binary(file) as stream:
        end = _fill_buffer(stream, view)
        start = offset = len(_BOM) if buffer.startswith(_BOM, 0, end) else 0
        if buffer.find(b"\0", start, min(end, start + 1024)) >= 0:
            raise UserError(f"{file.url} is not text: it holds zero bytes (is it binary, compressed or UTF-16?)")
        # A piece is split off only if more than two pieces are buffered, since the search for its end must not run past
        # the buffered bytes.
        while True:
            if end - start <= 2 * PIECE_BYTES:
                view[: end - start] = view[start:end]
                start, end = 0, end - start
                end += _fill_buffer(stream, view[end:])
            if end - start <= 2 * PIECE_BYTES:
                yield file, offset, view[start:end], True
                return
            piece_end = _find_piece_end(buffer, start)
            yield file, offset, view[start:piece_end], False
            start, offset = piece_end, offset + piece_end - start


def _fill_buffer(stream: Any, view: memoryview) -> int:
    """Reads until the view is full or the file ends. Returns the number of bytes read."""
    # Remote files may return fewer bytes than requested before their end.
    filled = 0
    while filled < len(view) and (count := stream.readinto(view[filled:])):
        filled += count
    return filled


def _find_piece_end(buffer: bytearray, start: int) -> int:
    """Returns the end of a piece. It is before a line that starts with text, so that it affects few tokens."""
    min_end, max_end = start + PIECE_BYTES, start + 2 * PIECE_BYTES
    if match := _LINE_START.search(buffer, min_end, max_end):
        return match.end()
    # If there is no such line, splits at the limit, but not inside a character. Continuation bytes start with bits 10.
    piece_end = max_end
    while piece_end > min_end and buffer[piece_end] & 0xC0 == 0x80:
        piece_end -= 1
    return piece_end


def _line_number(file: File, offset: int) -> int:
    """Returns the line number, from 1, of the byte at `offset` of a file."""
    line = 1
    with open_binary(file) as stream:
        while offset > 0 and (block := stream.read(min(offset, PIECE_BYTES))):
            line += block.count(b"\n")
            offset -= len(block)
    return line
