"""Names from outside that become paths: of an object in a bucket, of a file that another file names, of a run."""

from __future__ import annotations

import re
from pathlib import Path

from lm_trainer.core.errors import UserError

# Of ASCII and Latin-1, and halves of characters, which no file system takes.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_DRIVE = re.compile(r"[A-Za-z]:")


def check_name(name: object, source: object) -> str:
    """Returns a relative path that came from outside, written with `/`, if it stays in its directory on any system.

    Args:
        name: as it was listed or read.
        source: the place that it was found in, for the message.

    Raises:
        UserError: for what is no text, is absolute, has an empty part, `.` or `..`, or has a backslash, a drive of
            Windows or a control character.
    """
    if problem := _problem(name):
        raise UserError(f"{source}: the name {name!r} {problem}; rename or remove it there")
    return str(name)


def path_inside(directory: Path, name: object, source: object) -> Path:
    """Returns the path of a file of a directory by a name that came from outside, to be read or written.

    A link on the way may lead to another place of the directory. Below a snapshot of the Hugging Face hub's cache, it
    may also lead to the files of the same repository, where the cache keeps them.

    Args:
        directory: which the file has to be in; it need not exist.
        name: relative to it, written with `/`.
        source: the place that the name was found in, for the message.

    Raises:
        UserError: as `check_name`, and for a link that leads out of the directory.
    """
    path = directory / check_name(name, source)
    try:
        target, home = path.resolve(), directory.resolve()
    except (OSError, RuntimeError):
        raise UserError(f"{path}: is a link that leads back to itself; remove it") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise UserError(f"{path}: is a link to {target}, outside its directory; copy the file here if you trust it")
    return path


def _problem(name: object) -> str | None:
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
