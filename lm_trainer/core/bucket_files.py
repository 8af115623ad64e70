"""Files between this machine and directories in object storage, however large they are."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lm_trainer.core.bucket import Bucket, StoragePath, explain
from lm_trainer.core.errors import MachineError, UserError, disk_error
from lm_trainer.core.inside import path_inside

_AT_ONCE = {"s3": 5 * 2**30}
"""Bytes of the largest object that the protocol takes in one request."""
_PIECE_BYTES = 64 << 20
"""Bytes of a part of a large file. S3 takes 10,000 of them, which are 625 GiB."""


def fetch(directory: Bucket, keys: Iterable[str], to: Path, sizes: Mapping[str, int] | None = None) -> None:
    """Copies objects, those of them that exist, into a local directory, each under its key.

    Args:
        directory: what the keys are below.
        keys: the objects.
        to: the local directory.
        sizes: of those that may be large, which are then read in pieces.

    Raises:
        UserError: for a key that leads out of that directory, before anything is copied.
        MachineError: when the server cannot be reached or refuses, an object goes while it is read, or the file system
            refuses.
    """
    # Consoles of buckets mark a folder by an empty object whose key ends with a slash.
    files = {key: path_inside(to, key, directory) for key in keys if not key.endswith("/")}
    for key, file in files.items():
        try:
            _fetch(directory, key, file, (sizes or {}).get(key, 0))
        except OSError as error:
            told = f"{file}: {directory}/{key} cannot be written there ({error.strerror})"
            raise disk_error(error) or MachineError(told) from None


def _fetch(directory: Bucket, key: str, file: Path, size: int) -> None:
    whole = [slice(None)] if size <= _PIECE_BYTES else []
    pieces = whole or (slice(at, min(at + _PIECE_BYTES, size)) for at in range(0, size, _PIECE_BYTES))
    for number, piece in enumerate(pieces):
        content = directory.read(key, within=piece)
        if content is None:
            if number:
                raise MachineError(f"{directory}/{key} was deleted while it was read; start again")
            break
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab" if number else "wb") as out:
            out.write(content)


def put(source: Path, directory: Bucket) -> None:
    """Copies every file below a local directory, under its path there.

    Raises:
        UserError: for a file that the server takes in parts alone, where the package for that is missing, before any
            is copied.
        MachineError: when the server cannot be reached or refuses.
    """
    files = {file.relative_to(source).as_posix(): file for file in sorted(source.rglob("*")) if file.is_file()}
    sizes = {key: file.stat().st_size for key, file in files.items()}
    most = _AT_ONCE.get(directory.scheme, sys.maxsize)
    large = next((key for key, size in sizes.items() if size > most), None)
    in_parts = None if large is None else _writer_in_parts(directory, large, sizes[large])
    for key, file in files.items():
        if in_parts is not None and sizes[key] > most:
            in_parts(key, file)
        else:
            directory.write(key, file.read_bytes())


def _writer_in_parts(directory: Bucket, key: str, size: int) -> Callable[[str, Path], None]:
    """Writes files to S3 in parts, which TensorStore does not do."""
    spec = directory.spec()
    region = {"region_name": spec["aws_region"]} if "aws_region" in spec else {}
    try:
        store = importlib.import_module("s3fs").S3FileSystem(endpoint_url=spec.get("endpoint"), client_kwargs=region)
    except ImportError:
        raise UserError(
            f"{directory}: {key} has {size:,} bytes, and S3 takes {_AT_ONCE['s3']:,} in one request; to write it in "
            f"parts, pip install 'lm_trainer[s3]'; or write a dtype of 16 bits (--dtype bf16) or smaller shards "
            f"(--max-shard-size)"
        ) from None

    def write(key: str, file: Path) -> None:
        try:
            to = "/".join(part for part in (directory.bucket, directory.path, key) if part)
            store.put_file(str(file), to, chunksize=_PIECE_BYTES)
        except Exception as error:  # the file system's own, of many classes
            raise MachineError(f"{directory}: cannot write {key}: {explain(error, directory, 0)}") from None

    return write


@contextlib.contextmanager
def written_to(directory: StoragePath) -> Iterator[Path]:
    """Hands out a local directory to write files into, which come to `directory`: that itself, where it is local."""
    if isinstance(directory, Path):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="lmt-") as draft:
        yield Path(draft)
        put(Path(draft), directory)


def local_copy(directory: StoragePath, *keys: str, sizes: Mapping[str, int] | None = None) -> Path:
    """Returns a local directory with these files of `directory`, and all below them; that itself where it is local.

    The copy is removed when the process ends. `sizes` as of `fetch`, whose keys are copied as well.
    """
    if isinstance(directory, Path):
        return directory
    to = Path(tempfile.mkdtemp(prefix="lmt-")) / directory.name
    atexit.register(shutil.rmtree, to.parent, ignore_errors=True)
    to.mkdir()
    for key in keys:
        fetch(directory, [key, *(f"{key}/{name}" for name in directory.list(key))], to)
    fetch(directory, sizes or {}, to, sizes)
    return to
