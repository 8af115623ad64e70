"""Compressed files: maps file name endings to compressions, for all sources, and opens zip archives."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from lm_trainer.core.errors import UserError

COMPRESSIONS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".bz2": "bz2",
    ".xz": "xz",
    ".lzma": "lzma",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".zip": "zip",
}
"""The fsspec compression name for each file ending."""

UNPACKED = ", ".join(COMPRESSIONS)
"""File name endings of the supported compressions, for messages."""

# Unsupported compressions and archives, whose bytes would otherwise be read as text if `data.source.type` is set.
_NOT_UNPACKED = (".lz4", ".lz", ".lzo", ".br", ".sz", ".snappy", ".z", ".7z", ".rar", ".tgz", ".tbz2", ".txz")


def find_compression(url: str) -> str | None:
    """Returns the fsspec compression name that matches the ending of a path or URL; None for a plain file."""
    return COMPRESSIONS.get(_extension(_file_name(url)))


def file_suffix(url: str) -> str:
    """Returns the lower-case extension that precedes any compression suffix: `.jsonl` for `x.JSONL.gz`."""
    name = _file_name(url)
    ending = _extension(name)
    return _extension(name.removesuffix(ending)) if ending in COMPRESSIONS else ending


def unpacking_problem(url: str) -> str | None:
    """Explains why a file cannot be unpacked, and what to do; None if it can be unpacked or is a plain file."""
    ending = file_suffix(url)
    if ending in COMPRESSIONS:
        return f"is packed twice ({''.join(_last_extensions(url))}); unpack it once"
    if ending in _NOT_UNPACKED:
        return f"is packed as {ending}, which is not read; unpack it, or pack it in one of these: {UNPACKED}"
    return None


@contextmanager
def open_zip(stored: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """Opens the only file in a zip archive.

    Raises:
        UserError: if the archive has several files or none, is encrypted, or uses an unsupported compression.
        zipfile.BadZipFile: if the archive is damaged, or not a zip archive.
    """
    with zipfile.ZipFile(stored) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            raise UserError(f"{name} holds {len(members)} files, and only an archive of one is read; unpack it")
        if members[0].flag_bits & 1:
            raise UserError(f"{name} is encrypted; unpack it")
        try:
            opened = archive.open(members[0])
        except NotImplementedError as error:
            raise UserError(f"{name} is packed in a way that is not read ({error}); unpack it") from None
        with opened as stream:
            yield stream


def _file_name(url: str) -> str:
    """Returns the lower-case name of the file at the end of a path or URL, without the query."""
    if "://" in url:
        # In a chained URL, the first link with a path is the file to read, and the other links locate it.
        links = [link for link in url.split("::") if not link.endswith("://") and "://" in link]
        url = (links or [url])[0].split("?")[0]
    return url.lower().rpartition("/")[2]


def _extension(name: str) -> str:
    return os.path.splitext(name)[1]


def _last_extensions(url: str) -> tuple[str, str]:
    """Returns the last two extensions of a name, such as (`.gz`, `.zst`)."""
    name, last = os.path.splitext(_file_name(url))
    return _extension(name), last
