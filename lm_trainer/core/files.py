"""Checks paths that users write, and writes files atomically."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lm_trainer.core.errors import UserError

AnyPath = str | os.PathLike[str]
"""A path as Python callers may pass it."""

KEYS_WITH_URLS = (
    *("data.train_urls", "data.validation_urls", "data.cache_dir", "data.source.path"),
    *("trainer.checkpointer.base_path", "trainer.load_checkpoint_path", "trainer.initialize_from", "hf_save_path"),
    *("loss.reference", "loss.teacher"),
    *("trainer.tracker.logdir", "trainer.jax_compilation_cache_dir"),
)
"""Configuration keys that accept URLs."""

HUB_NAME = "a name on the Hugging Face hub"
"""Description of the alternative to a path in keys and arguments for models and tokenizers."""

# A single slash also matches, because `pathlib` collapses two slashes. Windows drives have one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)")


# Matches shell variables.
_VARIABLE = re.compile(r"\$(?:\{[^}]*\}|[A-Za-z_]\w*)")


def expand_home(path: AnyPath) -> str:
    """Expands `~` or `~USER` at the beginning of a path to the home directory.

    Every path that a user writes is expanded when it is used (`local_path` and `storage_path` do so). The configuration
    keeps the original path, because it may be read on a machine with another home directory.
    """
    return os.path.expanduser(os.fspath(path))


def path_problem(path: AnyPath, schemes: Sequence[str] = (), name: str = "") -> str | None:
    """Explains why a path is invalid and what to write instead; None if it is valid.

    A path must not be a URL with a scheme outside `schemes`, contain a shell variable, or begin with the home directory
    of an unknown user.

    Args:
        path: the path as the user wrote it.
        schemes: URL schemes that are accepted in addition to paths.
        name: description of other values that are accepted, for the message.
    """
    if "\0" in os.fspath(path):
        return f"{os.fspath(path)!r}: no path has a zero character"
    return url_problem(path, schemes, name) or shell_variable_problem(path) or _home_problem(path)


def shell_variable_problem(path: AnyPath) -> str | None:
    """Like `path_problem`, but only for shell variables, because a file must mean the same on every machine."""
    text = os.fspath(path)
    if match := _VARIABLE.search(text):
        return (
            f"{text}: {match[0]} is not replaced by the value of a variable; write the path itself, or set the key on "
            f"the command line, where the shell replaces it"
        )
    return None


def _home_problem(path: AnyPath) -> str | None:
    text = os.fspath(path)
    if text.startswith("~") and expand_home(text) == text:
        return f"{text}: there is no home of {text.partition('/')[0]}; a directory of that name is written ./{text}"
    return None


def url_problem(path: AnyPath, schemes: Sequence[str] = (), name: str = "") -> str | None:
    """Like `path_problem`, but only for URLs."""
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None or (match[1].lower() in schemes and match[2] == "//"):
        return None
    if match[1].lower() in schemes:
        return f"{text} has lost a slash of its URL, as in pathlib.Path; write it as text, with {match[1]}://"
    if match[1].lower() == "file":
        return f"{text} is a URL; write the path alone: /{text[match.end() :].lstrip('/')}"
    if match[2] == "/" and not isinstance(path, str):
        text = f"{match[1]}://{text[match.end() :]}"
    accepted = ["a path on this machine", *([name] if name else []), *(f"{scheme}://" for scheme in schemes)]
    return (
        f"{text} is a URL, and only {' or '.join(accepted)} works here; copy the files or mount the bucket, and write "
        f"that path. Keys that take URLs: {', '.join(KEYS_WITH_URLS)}"
    )


def local_path(path: AnyPath) -> Path:
    """Returns a path on this machine, with `~` expanded.

    Raises:
        UserError: if the path is a URL, which would be taken for a directory name, or is in the home of an unknown
            user.
    """
    if problem := url_problem(path) or _home_problem(path):
        raise UserError(problem)
    return Path(expand_home(path))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file with a rename, so that a crash leaves either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # A file system may perform the rename before it writes the data. A power cut would leave an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # Errors of `write` do not have a file name.
        error.filename = str(path)
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append_line(path: Path, line: bytes) -> None:
    """Appends a line to a file and syncs it to disk.

    If a kill has truncated the previous line, a line break is added first, so that the new line is not corrupted.
    """
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def ensure_writable_directory(directory: Path, setting: str) -> None:
    """Creates a directory and checks that files can be written to it.

    Args:
        directory: path of the directory. Missing parents are created.
        setting: the name of the setting with which the user can choose another location.

    Raises:
        UserError: if the directory cannot be created or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Writes a file, because permissions do not reflect quotas, read-only mounts or network file systems.
        # All processes use the same name, so that a file left by a kill is removed at the next start.
        probe = directory / ".write-test"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); choose another place with {setting}"
        ) from error
