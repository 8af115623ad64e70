"""Files that are complete or, after a crash, as they were before."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lm_trainer.core.errors import UserError

AnyPath = str | os.PathLike[str]
"""A path as callers in Python write it."""

TAKE_URLS = (
    *("data.train_urls", "data.validation_urls", "data.cache_dir", "data.source.path"),
    *("trainer.checkpointer.base_path", "trainer.load_checkpoint_path", "trainer.initialize_from", "hf_save_path"),
    *("trainer.tracker.logdir", "trainer.jax_compilation_cache_dir"),
)
"""Keys that take URLs."""

HUB_NAME = "a name on the Hugging Face hub"
"""Stands in the place of a path in keys and arguments that take models and tokenizers."""

# With one slash as well, which is what `pathlib` makes of two. A drive of Windows has one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)")


# As shells write them.
_VARIABLE = re.compile(r"\$(?:\{[^}]*\}|[A-Za-z_]\w*)")


def expanded(path: AnyPath) -> str:
    """Returns a path with the home of a user in place of `~` or `~USER` at its beginning.

    Every path that a person writes goes through here (`local_path` and `storage_path` do so) when it is used, and stays
    as it was written in the configuration, which may be read on a machine with another home.
    """
    return os.path.expanduser(os.fspath(path))


def path_problem(path: AnyPath, schemes: Sequence[str] = (), name: str = "") -> str | None:
    """Says why a path cannot be used, and what to write instead; None where it can be.

    It cannot be a URL but for some, hold a variable of a shell, or begin with the home of a user that there is not.

    Args:
        path: what was written.
        schemes: of the URLs that work in the place of a path.
        name: what else works in its place.
    """
    if "\0" in os.fspath(path):
        return f"{os.fspath(path)!r}: no path has a zero character"
    return url_problem(path, schemes, name) or variable_problem(path) or _home_problem(path)


def variable_problem(path: AnyPath) -> str | None:
    """As `path_problem`, for variables alone: a file means the same wherever it is read."""
    text = os.fspath(path)
    if found := _VARIABLE.search(text):
        return (
            f"{text}: {found[0]} is not replaced by the value of a variable; write the path itself, or set the key on "
            f"the command line, where the shell replaces it"
        )
    return None


def _home_problem(path: AnyPath) -> str | None:
    text = os.fspath(path)
    if text.startswith("~") and expanded(text) == text:
        return f"{text}: there is no home of {text.partition('/')[0]}; a directory of that name is written ./{text}"
    return None


def url_problem(path: AnyPath, schemes: Sequence[str] = (), name: str = "") -> str | None:
    """As `path_problem`, for URLs alone."""
    text = os.fspath(path)
    found = _URL.match(text)
    if found is None or (found[1].lower() in schemes and found[2] == "//"):
        return None
    if found[1].lower() in schemes:
        return f"{text} has lost a slash of its URL, as in pathlib.Path; write it as text, with {found[1]}://"
    if found[1].lower() == "file":
        return f"{text} is a URL; write the path alone: /{text[found.end() :].lstrip('/')}"
    if found[2] == "/" and not isinstance(path, str):
        text = f"{found[1]}://{text[found.end() :]}"
    works = ["a path on this machine", *([name] if name else []), *(f"{each}://" for each in schemes)]
    return (
        f"{text} is a URL, and only {' or '.join(works)} works here; copy the files or mount the bucket, and write "
        f"that path. Keys that take URLs: {', '.join(TAKE_URLS)}"
    )


def local_path(path: AnyPath) -> Path:
    """Returns a path on this machine, with `~` for the home of a user.

    Raises:
        UserError: for a URL, which would be taken for the name of a directory, and for a home that there is not.
    """
    if problem := url_problem(path) or _home_problem(path):
        raise UserError(problem)
    return Path(expanded(path))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file by a rename, so that a crash leaves the old content or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # A file system may carry out the rename before the data: after a power cut the file would be empty.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # An error of `write` does not know of which file.
        error.filename = str(path)
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append_line(path: Path, line: bytes) -> None:
    """Adds a line to a file, which is on the disk when this returns.

    A line before it that a kill has cut off is ended, so that it does not spoil this one.
    """
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def make_writable(directory: Path, setting: str) -> None:
    """Creates a directory and finds at once whether files can be written there.

    Args:
        directory: the directory, whose parents may be missing too.
        setting: the name of the setting by which the user can choose another place.

    Raises:
        UserError: when it cannot be created or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # By trying: permissions tell nothing of quotas, read-only mounts or network file systems.
        # One name for all processes: what a kill leaves here goes with the next start.
        probe = directory / ".write-test"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); choose another place with {setting}"
        ) from error
