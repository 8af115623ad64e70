"""Copies files of any size between this machine and object storage."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lm_trainer.core.bucket import Bucket, StoragePath, explain_failed_request
from lm_trainer.core.errors import MachineError, UserError, translate_disk_error
from lm_trainer.core.safe_names import path_inside

_MAX_PUT = {"s3": 5 * 2**30}
"""Maps a URL scheme to the size in bytes of the largest object that the protocol accepts in one request."""
_PART_BYTES = 64 << 20
"""Number of bytes per part of a large file. S3 accepts 10,000 parts, which allows 625 GiB."""


def download_objects(directory: Bucket, keys: Iterable[str], to: Path, sizes: Mapping[str, int] | None = None) -> None:
    """Copies objects into a local directory, each under its key. Missing objects are skipped.

    Args:
        directory: the directory in object storage.
        keys: keys of the objects, relative to `directory`.
        to: the local directory.
        sizes: sizes in bytes of objects that may be large, which are read in parts.

    Raises:
        UserError: if a key leads out of the local directory. Raised before anything is copied.
        MachineError: if the server is unreachable or refuses the request, an object is deleted while it is read, or the
            file cannot be written.
    """
    # Bucket consoles mark a folder by an empty object whose key ends in a slash.
    files = {key: path_inside(to, key, directory) for key in keys if not key.endswith("/")}
    for key, file in files.items():
        try:
            _download_object(directory, key, file, (sizes or {}).get(key, 0))
        except OSError as error:
            message = f"{file}: {directory}/{key} cannot be written there ({error.strerror})"
            raise translate_disk_error(error) or MachineError(message) from None


def _download_object(directory: Bucket, key: str, file: Path, size: int) -> None:
    full_range = [slice(None)] if size <= _PART_BYTES else []
    pieces = full_range or (slice(offset, min(offset + _PART_BYTES, size)) for offset in range(0, size, _PART_BYTES))
    for number, piece in enumerate(pieces):
        content = directory.read(key, within=piece)
        if content is None:
            if number:
                raise MachineError(f"{directory}/{key} was deleted while it was read; start again")
            break
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab" if number else "wb") as out:
            out.write(content)


def upload_directory(source: Path, directory: Bucket) -> None:
    """Uploads every file below a local directory, each under its relative path.

    Raises:
        UserError: if a file needs a multipart upload and the package for it is missing. Raised before anything is
            copied.
        MachineError: if the server is unreachable or refuses the request.
    """
    files = {file.relative_to(source).as_posix(): file for file in sorted(source.rglob("*")) if file.is_file()}
    sizes = {key: file.stat().st_size for key, file in files.items()}
    limit = _MAX_PUT.get(directory.scheme, sys.maxsize)
    large = next((key for key, size in sizes.items() if size > limit), None)
    write_multipart = None if large is None else _multipart_writer(directory, large, sizes[large])
    for key, file in files.items():
        if write_multipart is not None and sizes[key] > limit:
            write_multipart(key, file)
        else:
            directory.write(key, file.read_bytes())


def _multipart_writer(directory: Bucket, key: str, size: int) -> Callable[[str, Path], None]:
    """Returns a function for multipart uploads to S3, which TensorStore does not support."""
    spec = directory.spec()
    region = {"region_name": spec["aws_region"]} if "aws_region" in spec else {}
    try:
        store = importlib.import_module("s3fs").S3FileSystem(endpoint_url=spec.get("endpoint"), client_kwargs=region)
    except ImportError:
        raise UserError(
            f"{directory}: {key} has {size:,} bytes, and S3 takes {_MAX_PUT['s3']:,} in one request; to write it in "
            f"parts, pip install 'lm_trainer[s3]'; or write a dtype of 16 bits (--dtype bf16) or smaller shards "
            f"(--max-shard-size)"
        ) from None

    def write(key: str, file: Path) -> None:
        try:
            to = "/".join(part for part in (directory.bucket, directory.path, key) if part)
            store.put_file(str(file), to, chunksize=_PART_BYTES)
        except Exception as error:  # s3fs raises errors of many classes
            raise MachineError(
                f"{directory}: cannot write {key}: {explain_failed_request(error, directory, 0)}"
            ) from None

    return write


@contextlib.contextmanager
def staging_directory(directory: StoragePath) -> Iterator[Path]:
    """Yields a local directory to write files into. On exit, they are uploaded if `directory` is in a bucket."""
    if isinstance(directory, Path):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="lmt-") as draft:
        yield Path(draft)
        upload_directory(Path(draft), directory)


def local_copy(directory: StoragePath, *keys: str, sizes: Mapping[str, int] | None = None) -> Path:
    """Returns a local directory that contains these keys of `directory` and everything below them.

    A local `directory` is returned unchanged. A downloaded copy is removed when the process ends. The keys of `sizes`
    are also copied; see `download_objects`.
    """
    if isinstance(directory, Path):
        return directory
    to = Path(tempfile.mkdtemp(prefix="lmt-")) / directory.name
    atexit.register(shutil.rmtree, to.parent, ignore_errors=True)
    to.mkdir()
    for key in keys:
        download_objects(directory, [key, *(f"{key}/{name}" for name in directory.list(key))], to)
    download_objects(directory, sizes or {}, to, sizes)
    return to
