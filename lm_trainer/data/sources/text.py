"""Plain text files: one file is one document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split
from lm_trainer.data.sources.urls import File, group, list_files, numbered, open_binary, total_text_size

PIECE_BYTES = 1 << 20
"""A longer file is encoded in pieces of about this size, so that memory stays bounded; it is still one document."""

_BOM = b"\xef\xbb\xbf"
_LINE_START = re.compile(rb"\n(?=[^\s])")


class TextFiles(SourceConfig):
    """Text files in UTF-8, each one document."""

    type: Literal["text"] = "text"

    has_fields: ClassVar[bool] = False
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".js")

    def shards(
        self, split: Split, urls: Sequence[str], text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del text_key, fields
        return [TextShard(files) for files in group(list_files(urls, f"data.{split}_urls"))]


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
        for number, (where, piece, line, last) in numbered((_pieces(file) for file in self.files), start):
            try:
                yield Row(number, where, piece.decode("utf-8"), last, text_bytes=len(piece))
            except UnicodeDecodeError as error:
                line += piece.count(b"\n", 0, error.start)
                near = piece[max(0, error.start - 8) : error.start + 8]
                yield BadRow(number, f"{where}:{line}", f"invalid UTF-8 near {near!r}", last)


def _pieces(file: File) -> Iterator[tuple[str, bytes, int, bool]]:
    """Yields (file, bytes, number of the first line, whether it is the last piece)."""
    line = 1
    with open_binary(file) as stream:
        buffer = _fill(stream, b"").removeprefix(_BOM)
        if b"\0" in buffer[:1024]:
            raise UserError(f"{file.url} is not text: it holds zero bytes (is it binary, compressed or UTF-16?)")
        while True:
            buffer = _fill(stream, buffer)
            if len(buffer) <= 2 * PIECE_BYTES:
                yield file.name, buffer, line, True
                return
            cut = _cut(buffer)
            yield file.name, buffer[:cut], line, False
            line += buffer.count(b"\n", 0, cut)
            buffer = buffer[cut:]


def _fill(stream: IO[bytes], buffer: bytes) -> bytes:
    """Reads on until the buffer is longer than two pieces or the file has ended; remote files may give short reads."""
    blocks = [buffer]
    missing = 2 * PIECE_BYTES + 1 - len(buffer)
    while missing > 0 and (block := stream.read(missing)):
        blocks.append(block)
        missing -= len(block)
    return b"".join(blocks)


def _cut(buffer: bytes) -> int:
    """Where a piece ends: before a line that starts with text, so that few tokens could have crossed the cut."""
    if match := _LINE_START.search(buffer, PIECE_BYTES, 2 * PIECE_BYTES):
        return match.end()
    cut = 2 * PIECE_BYTES
    while cut > PIECE_BYTES and buffer[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
