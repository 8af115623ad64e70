"""Output directories that are complete or do not exist."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lm_trainer.core.bucket import Bucket, StoragePath, read_json
from lm_trainer.core.bucket_files import download_objects, upload_directory
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.file_lock import try_lock
from lm_trainer.core.files import local_path

COMPLETE = "_COMPLETE.json"
"""Object that is written last into a directory of a bucket. It lists the names and sizes of all other objects."""


def check_output(out: StoragePath, *, overwrite: bool, replaceable: Collection[str]) -> None:
    """Checks that `atomic_directory` may write its result to `out`; changes no files.

    Raises:
        UserError: if `out` is a URL or a file, or contains files and `overwrite` is not set, or contains a file whose
            name matches none of the patterns in `replaceable`: unrelated files are never deleted.
    """
    if isinstance(out, Bucket):
        # If the last object is missing, the directory was left by a writer that was killed.
        names = iter(out.list())
        _check_replaceable(out, names, overwrite=overwrite or not is_export(out), replaceable=(*replaceable, COMPLETE))
        return
    local_path(out)
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out}: exists and is not a directory; choose another name")
    _check_replaceable(out, _walk_names(out), overwrite=overwrite, replaceable=replaceable)


def _walk_names(directory: Path) -> Iterator[str]:
    """Yields the relative path of every file and every empty directory below a directory."""
    for folder, folders, files in os.walk(directory):
        # Links to directories are listed, but not followed.
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        if Path(folder) != directory and not folders and not files:
            yield Path(folder).relative_to(directory).as_posix()
        yield from ((Path(folder) / name).relative_to(directory).as_posix() for name in sorted([*files, *links]))


def _check_replaceable(
    out: StoragePath, names: Iterator[str], *, overwrite: bool, replaceable: Collection[str]
) -> None:
    for name in names:
        if not overwrite:
            raise UserError(f"{out}: exists and is not empty; choose another name, or say --overwrite to replace it")
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in replaceable):
            raise UserError(
                f"{out}: holds {name}, which is not part of an exported model, so --overwrite does not touch it; "
                f"choose another directory"
            )


@contextlib.contextmanager
def atomic_directory(out: StoragePath, *, overwrite: bool, replaceable: Collection[str]) -> Iterator[Path]:
    """Creates an empty directory to write into. It becomes `out` when the block ends, or is removed if the block fails.

    The next writer of the same `out` removes the leftovers of a writer that was killed. In a bucket, an object that
    lists all others is written last, so a directory without it is incomplete.

    Raises:
        UserError: for the same reasons as in `check_output`, or if another process is currently writing `out`.
        MachineError: if the file system reports an error.
    """
    if isinstance(out, Bucket):
        with _upload_directory(out, overwrite=overwrite, replaceable=replaceable) as draft:
            yield draft
        return
    # Checked before the path is made absolute, because a URL would then look like any other directory.
    out = Path(os.path.abspath(local_path(out)))
    check_output(out, overwrite=overwrite, replaceable=replaceable)
    # The draft is in the same directory as `out`, because a rename is atomic only within one file system.
    draft = out.parent / f".{out.name}.incomplete"
    if draft.is_symlink():
        raise UserError(f"{draft}: is a link, and what it leads to would be emptied; remove it")
    with _as_machine_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(exist_ok=True)
    with _draft_lock(draft, out):
        try:
            with _as_machine_errors(out):
                _clear_directory(draft)
                yield draft
                # Flushed to disk before the rename, so that a power failure cannot leave a directory of empty files.
                for path in (*draft.rglob("*"), draft):
                    _fsync(path)
                # Checked a second time: a file may have been added while a large model was written.
                check_output(out, overwrite=overwrite, replaceable=replaceable)
                _replace_with_draft(draft, out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _upload_directory(out: Bucket, *, overwrite: bool, replaceable: Collection[str]) -> Iterator[Path]:
    check_output(out, overwrite=overwrite, replaceable=replaceable)
    with tempfile.TemporaryDirectory(prefix="lmt-") as directory, _as_machine_errors(out):
        draft = Path(directory)
        yield draft
        check_output(out, overwrite=overwrite, replaceable=replaceable)
        # From here until the last object is written, the directory is incomplete.
        out.delete(COMPLETE)
        sizes = {str(path.relative_to(draft)): path.stat().st_size for path in draft.rglob("*") if path.is_file()}
        out.delete(*(name for name in out.list() if name not in sizes))
        upload_directory(draft, out)
        out.write(COMPLETE, json.dumps({"files": sizes}, indent=1).encode())


def is_export(bucket: Bucket) -> bool:
    """Returns True if a directory of a bucket is complete: it has the object that `atomic_directory` writes last."""
    return bucket.read(COMPLETE) is not None


def list_exported_files(bucket: Bucket) -> dict[str, int]:
    """Lists the files of a complete directory of a bucket, with their sizes in bytes.

    Raises:
        UserError: if one of the files is missing, or their list is damaged.
    """
    files, names = read_json(bucket, COMPLETE).get("files", {}), set(bucket.list())
    if not isinstance(files, Mapping) or not all(isinstance(size, int) and size >= 0 for size in files.values()):
        raise UserError(f"{bucket}/{COMPLETE} is damaged: it names no files and their sizes; export the model again")
    if missing := sorted(set(files) - names):
        raise UserError(f"{bucket}: {missing[0]} is gone; export the model again")
    return dict(files)


@contextlib.contextmanager
def local_copy_of_export(out: StoragePath) -> Iterator[Path]:
    """Provides a local directory with the files of an export: `out` itself if local, otherwise a temporary copy."""
    if isinstance(out, Path):
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="lmt-") as copy:
        files = list_exported_files(out)
        with _as_machine_errors(Path(copy)):
            download_objects(out, files, Path(copy), files)
        yield Path(copy)


def _replace_with_draft(draft: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        draft.rename(out)
    else:
        # Renamed before files are deleted, so that a kill in between leaves the old model intact under another name.
        old = out.parent / f".{out.name}.replaced"
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        draft.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    _fsync(out.parent)


def _clear_directory(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _fsync(path: Path) -> None:
    """Waits until a file, or the list of names in a directory, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _draft_lock(draft: Path, out: Path) -> Iterator[None]:
    """Holds a lock on the draft. The lock is released at the latest when the process ends."""
    with _as_machine_errors(out):
        handle = os.open(draft, os.O_RDONLY)
    try:
        # On a file system without locks, the user must avoid concurrent writers.
        with contextlib.suppress(OSError):
            if not try_lock(handle):
                raise UserError(f"{out}: is being written by another process; wait for it to end")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _as_machine_errors(out: StoragePath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(f"{out}: cannot be written ({error.strerror or error}); nothing was left there") from None
