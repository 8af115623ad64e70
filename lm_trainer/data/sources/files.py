"""Identifies the files of a source, opens them, and groups them into shards."""

from __future__ import annotations

import functools
import gzip
import itertools
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home
from lm_trainer.data.sources.compression import find_compression, open_zip
from lm_trainer.data.sources.frames import DamagedFrames, open_frames

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

SHARD_BYTES = 64 << 20
"""Maximum number of stored bytes of a shard with several small files. A larger file is a separate shard."""

_COPY_BYTES = 1 << 20

# Keys under which file systems report the version of a file. The first available key is used. Hashes precede times.
_VERSION_KEYS = (
    "blob_id",
    "etag",
    "ETag",
    "md5Hash",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
)


class File(NamedTuple):
    """An existing file, with its size and version to detect changes."""

    url: str
    size: int
    version: str
    download: bool = False
    """True to copy a file from the Hugging Face hub to the hub cache before reading it."""
    local: bool = False
    """True if `url` is a literal local path, even if it contains special characters of globs, braces or URL chains."""

    @property
    def compressed(self) -> bool:
        return find_compression(self.url) is not None

    @property
    def name(self) -> str:
        """The URL without credentials, which is safe to display and store."""
        return _display_url(self.url)

    @property
    def path(self) -> str | None:
        """The absolute local path, also for `file://` URLs; None for remote files."""
        if self.local:
            return os.path.abspath(expand_home(self.url))
        return os.path.abspath(self.url.removeprefix("file://")) if self.url.startswith("file://") else None

    def identity(self) -> dict[str, object]:
        return {"url": self.name, "size": self.size, "version": self.version}

    def refresh(self) -> File:
        """Returns the current state of the file. A URL that includes the version is not looked up.

        Raises:
            UserError: if the file no longer exists.
        """
        if self.version and f"@{self.version}/" in self.url:
            return self
        try:
            filesystem, path = find_file_system(self.url, local=self.local)
            # fsspec caches listings, which would show the old state.
            filesystem.invalidate_cache()
            return look_up_file(filesystem, path, self.url)._replace(download=self.download)
        except OSError as error:
            raise UserError(
                f"cannot find {self.url} any more: {error.__cause__ or error}. Start again: what was read from other "
                "files is kept"
            ) from None


@functools.lru_cache(maxsize=256)
def _display_url(url: str) -> str:
    # Cached, since it is needed for every row, and a file may have millions of rows.
    return without_credentials(url)


def check_listed_url(url: str) -> str:
    """Checks the URL of a file that comes from a listing, and returns it.

    Raises:
        UserError: if fsspec would parse the name as a chain of URLs, which may lead anywhere.
    """
    if "::" in url:
        raise UserError(
            f"{url}: '::' in the name of a file stands for a chain of URLs, which is not followed; rename it"
        )
    return url


def find_file_system(url: str, *, local: bool) -> tuple[AbstractFileSystem, str]:
    """Returns the fsspec file system of `url`, and the path within it.

    Args:
        url: a path or URL.
        local: True to treat `url` as a literal local path.
    """
    # Imported lazily, since checking a configuration without files does not need it.
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    return (LocalFileSystem(), os.path.abspath(url)) if local else fsspec.core.url_to_fs(url)


def look_up_file(filesystem: AbstractFileSystem, path: str, url: str) -> File:
    """Looks up a file by its path in an fsspec file system.

    Raises:
        OSError: if the file does not exist, or is a directory.
    """
    from fsspec.implementations.local import LocalFileSystem

    info = filesystem.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError(url)
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    local = isinstance(filesystem, LocalFileSystem) and is_file(url)
    return File(url, int(info.get("size") or 0), version, local=local)


def is_file(url: str) -> bool:
    """Returns True if a URL is the path of a local file."""
    return os.path.isfile(expand_home(url))


def group_files(files: Sequence[File], shard_bytes: int = SHARD_BYTES) -> list[tuple[File, ...]]:
    """Splits the list of files into runs of about `shard_bytes`.

    The result depends only on the files, never on the number of processes, since shards are part of a cache's identity.
    """
    groups: list[tuple[File, ...]] = []
    current: list[File] = []
    for file in files:
        if current and sum(f.size for f in current) + file.size > shard_bytes:
            groups.append(tuple(current))
            current = []
        current.append(file)
    return [*groups, tuple(current)] if current else groups


@contextmanager
def open_binary(file: File) -> Iterator[IO[bytes]]:
    """Opens the uncompressed bytes of a file.

    Raises:
        UserError: if the file cannot be opened, or turns out to be truncated or damaged while it is read.
    """
    try:
        with _open_unpacked(file) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, DamagedFrames) as error:
        raise damage_error(file, error) from None
    except FileNotFoundError:
        raise UserError(f"{file.url} has disappeared since this run started") from None
    except OSError as error:
        raise UserError(f"cannot read {file.url}: {error}") from None
    except ValueError as error:
        if _lacks_byte_ranges(error):
            raise UserError(
                f"cannot read {file.name}: its server does not send parts of a file (byte ranges); "
                "download it, and name your copy"
            ) from None
        if "compression" not in str(error).lower():
            raise
        raise UserError(f"cannot read {file.url}: {error} (is the package for this compression installed?)") from None
    except Exception as error:
        # Errors of optional packages, which cannot be imported here. igzip_lib unpacks gzip for fsspec, and the others
        # read http and hf URLs.
        package = type(error).__module__.partition(".")[0]
        if package == "igzip_lib":
            raise damage_error(file, error) from None
        if package not in ("aiohttp", "httpx", "httpx2", "huggingface_hub"):
            raise
        raise UserError(
            f"cannot read {file.url}: {error}. Start again: what was read from other files is kept"
        ) from None


@contextmanager
def open_seekable(file: File) -> Iterator[IO[bytes]]:
    """Opens the uncompressed bytes of a file for random access. Unpacks a compressed file to a temporary file.

    Raises:
        UserError: see `open_binary`.
    """
    with open_binary(file) as stream:
        if not file.compressed:
            yield stream
            return
        # Some decompressors cannot seek backwards, and others restart from the beginning every time.
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(stream, unpacked, _COPY_BYTES)
            unpacked.seek(0)
            yield unpacked  # pyright: ignore[reportReturnType]


@contextmanager
def _open_unpacked(file: File) -> Iterator[IO[bytes]]:
    compression = find_compression(file.url)
    # These replace fsspec's decompressors, which do not notice if a file is truncated between or inside frames, and
    # read only the first file of an archive.
    if compression in ("zstd", "xz", "lzma", "bz2"):
        with _open_stored(file, None) as stream:
            yield open_frames(stream, compression, file.url)
    elif compression == "zip":
        with _open_stored(file, None) as stream, open_zip(stream, file.url) as member:
            yield member
    else:
        with _open_stored(file, compression) as stream:
            yield stream


def _lacks_byte_ranges(error: ValueError) -> bool:
    """Returns True if the server does not support byte ranges. fsspec has no specific error type for this."""
    return any(words in str(error) for words in ("range requests", "Cannot seek streaming HTTP file"))


def _open_stored(file: File, compression: str | None) -> Any:
    import fsspec

    if file.local:
        return fsspec.core.OpenFile(*find_file_system(file.url, local=True), "rb", compression)
    return fsspec.open(_download_hub_file(file.url) if file.download else file.url, "rb", compression)


def damage_error(file: File, error: Exception) -> UserError:
    """Returns the error for a file that turned out to be truncated or damaged while it was read."""
    # A few extra bytes after a compressed file look like the start of another, truncated file.
    reason = f"truncated, or followed by something else ({error})" if isinstance(error, EOFError) else str(error)
    return UserError(
        f"{file.url} is damaged: {reason}. Replace the file and start again: what was read from other files is kept"
    )


def _download_hub_file(url: str) -> str:
    """Returns the path of `hf://datasets/NAME@COMMIT/PATH` in the hub cache. Downloads the file if necessary."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, commit_and_path = url.removeprefix("hf://datasets/").partition("@")
    commit, _, path = commit_and_path.partition("/")
    try:
        return hf_hub_download(name, path, repo_type="dataset", revision=commit)
    except LocalEntryNotFoundError as error:  # a FileNotFoundError, which means that there is no answer and no copy
        raise UserError(f"cannot read {url}: {error}") from None


def total_text_size(files: Sequence[File]) -> int | None:
    """Returns the number of bytes of text in plain files; None if any file is compressed."""
    return None if any(file.compressed for file in files) else sum(file.size for file in files)


def number_items(groups: Iterator[Iterator[T]], start: int) -> Iterator[tuple[int, T]]:
    """Numbers the items of all groups consecutively, and skips the first `start` items."""
    return itertools.islice(enumerate(itertools.chain.from_iterable(groups)), start, None)
