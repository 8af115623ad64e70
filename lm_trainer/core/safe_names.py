"""Validates untrusted names that become paths: object keys, file names found in other files, and run IDs."""

from __future__ import annotations

import re
from pathlib import Path

from lm_trainer.core.errors import UserError

# Matches control characters of ASCII and Latin-1, and lone surrogates, which no file system accepts.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_DRIVE = re.compile(r"[A-Za-z]:")


def check_relative_path(name: object, source: object) -> str:
    """Returns an untrusted relative path, written with `/`, if it stays within its directory on any system.

    Args:
        name: the name as it was listed or read.
        source: the location of the name, for the message.

    Raises:
        UserError: if the name is not a string, is absolute, has an empty part, `.` or `..`, or has a backslash, a
            Windows drive or a control character.
    """
    if problem := _find_problem(name):
        raise UserError(f"{source}: the name {name!r} {problem}; rename or remove it there")
    return str(name)


def path_inside(directory: Path, name: object, source: object) -> Path:
    """Returns the path of a file to read or write in a directory, given an untrusted name.

    Symbolic links may point to other locations in the directory. In a snapshot of the Hugging Face hub's cache, they
    may also point to the blobs of the same repository.

    Args:
        directory: the directory to stay in, which need not exist.
        name: path relative to `directory`, written with `/`.
        source: the location of the name, for the message.

    Raises:
        UserError: see `check_relative_path`. Also raised if a link leads out of the directory.
    """
    path = directory / check_relative_path(name, source)
    try:
        target, home = path.resolve(), directory.resolve()
    except (OSError, RuntimeError):
        raise UserError(f"{path}: is a link that leads back to itself; remove it") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise UserError(f"{path}: is a link to {target}, outside its directory; copy the file here if you trust it")
    return path


def _find_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"is no text but {type(name).__name__}"
    parts = name.split("/")
    if _CONTROL.search(name):
        return "has a control character"
    if "\\" in name or _DRIVE.match(name):
        return "has a backslash or a drive, which lead elsewhere on Windows"
    if name.startswith("/"):
        return "is absolute, and leads out of its directory"
    if ".." in parts:
        return "has the part '..', and may lead out of its directory"
    if "" in parts or "." in parts:
        return "has an empty part or '.'"
    return None
