"""Files of a source: their identity, how they are opened, and how they are shared out among shards."""

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
from typing import IO, Any, NamedTuple

from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded
from lm_trainer.data.sources.compression import compression_of, open_zip
from lm_trainer.data.sources.frames import DamagedFrames, open_frames

SHARD_BYTES = 64 << 20
"""Small files are read together until this many stored bytes; a larger file is a shard of its own."""

_COPY_BYTES = 1 << 20

# By these, file systems tell versions of a file; the first that one has counts. Hashes come before times.
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
    """Existing file, with the size and version that tell if it has changed."""

    url: str
    size: int
    version: str
    download: bool = False
    """True if a file of the Hugging Face hub is copied into the hub's cache before it is read."""
    local: bool = False
    """True if `url` is a path of this machine as it stands, whatever signs of globs, braces or chains are in it."""

    @property
    def compressed(self) -> bool:
        return compression_of(self.url) is not None

    @property
    def name(self) -> str:
        """The URL without credentials, as it may be shown and written down."""
        return _shown(self.url)

    @property
    def path(self) -> str | None:
        """The absolute path on this machine, of a `file://` URL too; None where the file lies elsewhere."""
        if self.local:
            return os.path.abspath(expanded(self.url))
        return os.path.abspath(self.url.removeprefix("file://")) if self.url.startswith("file://") else None

    def identity(self) -> dict[str, Any]:
        return {"url": self.name, "size": self.size, "version": self.version}

    def now(self) -> File:
        """Returns the file as it is now; not asked for where the URL names its version.

        Raises:
            UserError: if it cannot be found any more.
        """
        if self.version and f"@{self.version}/" in self.url:
            return self
        try:
            filesystem, path = file_system(self.url, local=self.local)
            # fsspec keeps listings, which would show the file as it was.
            filesystem.invalidate_cache()
            return file_at(filesystem, path, self.url)._replace(download=self.download)
        except OSError as error:
            raise UserError(
                f"cannot find {self.url} any more: {error.__cause__ or error}. Start again: what was read from other "
                "files is kept"
            ) from None


@functools.lru_cache(maxsize=256)
def _shown(url: str) -> str:
    # Asked for with every row, of which a file has millions.
    return without_credentials(url)


def check_listed(url: str) -> str:
    """Returns the URL of a file that a listing gave.

    Raises:
        UserError: for one whose name fsspec would take for a chain of URLs, which may lead anywhere.
    """
    if "::" in url:
        raise UserError(
            f"{url}: '::' in the name of a file stands for a chain of URLs, which is not followed; rename it"
        )
    return url


def file_system(url: str, *, local: bool) -> tuple[Any, str]:
    """Returns the file system of fsspec that has `url`, and the path in it.

    Args:
        url: a path or URL.
        local: it is the path of a file of this machine, whatever it looks like.
    """
    # Imported where it is used: a check of a configuration without files does without.
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    return (LocalFileSystem(), os.path.abspath(url)) if local else fsspec.core.url_to_fs(url)


def file_at(filesystem: Any, path: str, url: str) -> File:
    """Looks a file up by its path in a file system of fsspec.

    Raises:
        OSError: if it is not there, or is a directory.
    """
    from fsspec.implementations.local import LocalFileSystem

    info = filesystem.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError(url)
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    local = isinstance(filesystem, LocalFileSystem) and is_file(url)
    return File(url, int(info.get("size") or 0), version, local=local)


def is_file(url: str) -> bool:
    """Tells if a URL is the path of a file of this machine."""
    return os.path.isfile(expanded(url))


def group(files: Sequence[File], shard_bytes: int = SHARD_BYTES) -> list[tuple[File, ...]]:
    """Cuts the list into runs of about `shard_bytes`.

    Depends on the files alone, never on the number of processes: shards are part of a cache's identity.
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
        UserError: if the file cannot be opened, or turns out truncated or damaged while it is read.
    """
    try:
        with _unpacked(file) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, DamagedFrames) as error:
        raise damaged(file, error) from None
    except FileNotFoundError:
        raise UserError(f"{file.url} has disappeared since this run started") from None
    except OSError as error:
        raise UserError(f"cannot read {file.url}: {error}") from None
    except ValueError as error:
        if _wants_ranges(error):
            raise UserError(
                f"cannot read {file.name}: its server does not send parts of a file (byte ranges); "
                "download it, and name your copy"
            ) from None
        if "compression" not in str(error).lower():
            raise
        raise UserError(f"cannot read {file.url}: {error} (is the package for this compression installed?)") from None
    except Exception as error:
        # Packages that may not be installed, so their errors cannot be named: the first unpacks gzip for fsspec, the
        # others read http and hf.
        package = type(error).__module__.partition(".")[0]
        if package == "igzip_lib":
            raise damaged(file, error) from None
        if package not in ("aiohttp", "httpx", "httpx2", "huggingface_hub"):
            raise
        raise UserError(
            f"cannot read {file.url}: {error}. Start again: what was read from other files is kept"
        ) from None


@contextmanager
def open_seekable(file: File) -> Iterator[IO[bytes]]:
    """Opens the uncompressed bytes of a file for reading at any place; a compressed one lies on the disk meanwhile.

    Raises:
        UserError: as `open_binary`.
    """
    with open_binary(file) as stream:
        if not file.compressed:
            yield stream
            return
        # Some unpackers cannot go back, and the others begin again from the front at every step back.
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(stream, unpacked, _COPY_BYTES)
            unpacked.seek(0)
            yield unpacked  # pyright: ignore[reportReturnType]


@contextmanager
def _unpacked(file: File) -> Iterator[IO[bytes]]:
    compression = compression_of(file.url)
    # Not fsspec's own: it takes files that were cut short between or inside of frames for files that have ended, and of
    # an archive it reads the first file alone.
    if compression in ("zstd", "xz", "lzma", "bz2"):
        with _stored(file, None) as stream:
            yield open_frames(stream, compression, file.url)
    elif compression == "zip":
        with _stored(file, None) as stream, open_zip(stream, file.url) as member:
            yield member
    else:
        with _stored(file, compression) as stream:
            yield stream


def _wants_ranges(error: ValueError) -> bool:
    """Tells if fsspec says that a server gives whole files alone; it has no type of error for that."""
    return any(words in str(error) for words in ("range requests", "Cannot seek streaming HTTP file"))


def _stored(file: File, compression: str | None) -> Any:
    import fsspec

    if file.local:
        return fsspec.core.OpenFile(*file_system(file.url, local=True), "rb", compression)
    return fsspec.open(_local_copy(file.url) if file.download else file.url, "rb", compression)


def damaged(file: File, error: Exception) -> UserError:
    """Returns the error for a file that turns out truncated or damaged while it is read."""
    # Where too little follows the end of a packed file to be a packed file, its unpacker misses another end.
    reason = f"truncated, or followed by something else ({error})" if isinstance(error, EOFError) else str(error)
    return UserError(
        f"{file.url} is damaged: {reason}. Replace the file and start again: what was read from other files is kept"
    )


def _local_copy(url: str) -> str:
    """Returns the path in the hub's cache of `hf://datasets/NAME@COMMIT/PATH`, downloaded first if it is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, _, rest = url.removeprefix("hf://datasets/").partition("@")
    commit, _, path = rest.partition("/")
    try:
        return hf_hub_download(name, path, repo_type="dataset", revision=commit)
    except LocalEntryNotFoundError as error:  # a FileNotFoundError that means: no answer, and no copy
        raise UserError(f"cannot read {url}: {error}") from None


def total_text_size(files: Sequence[File]) -> int | None:
    """Returns the bytes of text in plain files; None if any is compressed."""
    return None if any(file.compressed for file in files) else sum(file.size for file in files)


def numbered(groups: Iterator[Iterator[Any]], start: int) -> Iterator[tuple[int, Any]]:
    """Numbers the items of all groups through, and leaves out those before `start`."""
    return itertools.islice(enumerate(itertools.chain.from_iterable(groups)), start, None)
