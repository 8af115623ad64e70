"""Resolves the URLs of a configuration to lists of existing files."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home, shell_variable_problem
from lm_trainer.data.sources.compression import unpacking_problem
from lm_trainer.data.sources.files import File, check_listed_url, find_file_system, is_file, look_up_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def expand_braces(url: str) -> list[str]:
    """Expands `{1..128}`, `{001..128}` and `{a,b}` like a shell. The leftmost brace varies slowest.

    Braces without a range or comma are left unchanged.
    """
    for match in _BRACE.finditer(url):
        body = match[1]
        if numbers := _RANGE.fullmatch(body):
            options = _expand_range(numbers[1], numbers[2])
        elif "," in body:
            options = body.split(",")
        else:
            continue
        head, tail = url[: match.start()], url[match.end() :]
        return [head + option + expanded_tail for option in options for expanded_tail in expand_braces(tail)]
    return [url]


def _expand_range(first: str, last: str) -> list[str]:
    start, stop = int(first), int(last)
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if stop >= start else -1
    return [f"{number:0{width}d}" for number in range(start, stop + step, step)]


def list_files(urls: Sequence[str], key: str) -> list[File]:
    """Lists the files named by `urls`, in the order of the list. The matches of a glob are sorted by name.

    Args:
        urls: paths, fsspec URLs, globs and braces. The path of an existing local file is taken literally.
        key: the configuration key with the URLs, for messages.

    Raises:
        UserError: if a file does not exist, is a directory, is listed twice, or has an unsupported compression.
    """
    return [file for _, files in match_files(urls, key) for file in files]


_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
"""The extra of the package lm_trainer that each URL scheme requires."""


def match_files(urls: Sequence[str], key: str) -> list[tuple[str, list[File]]]:
    """Lists files like `list_files`, as pairs of a path, URL or glob and the files it names."""
    names = [name for url in urls for name in ([url] if is_file(url) else expand_braces(url))]
    matches = [(name, _find_files(name, key)) for name in names]
    name_by_path: dict[str, str] = {}
    for file in (file for _, files in matches for file in files):
        if (earlier_name := name_by_path.get(unique_path := _unique_path(file))) is not None:
            other = f" (as {earlier_name} before)" if earlier_name != file.name else ""
            raise UserError(f"{key}: {file.name} is listed twice{other}; each file may appear once")
        name_by_path[unique_path] = file.name
        if (reason := unpacking_problem(file.url)) is not None:
            raise UserError(f"{key}: {file.name} {reason}")
    return matches


def _unique_path(file: File) -> str:
    """Returns a unique path for a file, independent of the spelling of its path.

    A link counts as a separate file, because caches of the hub store equal files as links to the same file.
    """
    if not file.local and not file.url.startswith("file://"):
        return file.url
    directory, name = os.path.split(os.path.abspath(file.url.removeprefix("file://")))
    return os.path.join(os.path.realpath(directory), name)


def _resolve_file_system(url: str, key: str) -> tuple[Any, str]:
    """Returns the fsspec file system of `url`, and the path within it."""
    try:
        return find_file_system(url, local=is_file(url))
    except ImportError as error:
        if url.startswith(("http://", "https://")):
            raise UserError(f"{key}: {url} needs a package; run: pip install aiohttp") from None
        if (extra := _EXTRAS.get(url.partition("://")[0])) is not None:
            raise UserError(f"{key}: {url} needs a package; run: pip install 'lm_trainer[{extra}]'") from None
        raise UserError(f"{key}: {url} needs a package that is not installed: {error}") from None
    except Exception as error:
        # Chained URLs are opened while they are parsed, and every file system raises different errors.
        raise UserError(f"{key}: cannot open {url}: {str(error) or type(error).__name__}") from None


def _find_files(url: str, key: str) -> list[File]:
    # The query of a URL may contain a `$`.
    if "://" not in url and not is_file(url) and (problem := shell_variable_problem(url)):
        raise UserError(f"{key}: {problem}")
    url = expand_home(url)
    filesystem, path = _resolve_file_system(url, key)
    try:
        if not is_file(url) and any(character in path for character in "*?["):
            paths = sorted(p for p in filesystem.glob(path) if not filesystem.isdir(p))
            if not paths:
                raise UserError(f"{key}: no file matches {url}")
            return [look_up_file(filesystem, p, _matched_url(filesystem, p, url)) for p in paths]
        return [look_up_file(filesystem, path, url)]
    except UserError:
        raise
    # An OSError, or an error type of the file system's package.
    except Exception as error:
        raise UserError(f"{key}: {_explain_error(error, filesystem, path, url)}") from None


def _matched_url(filesystem: AbstractFileSystem, path: str, glob: str) -> str:
    """Returns the URL of a file matched by a glob."""
    if "://" not in glob:
        return path
    url = filesystem.unstrip_protocol(path)
    return url if "::" in glob else check_listed_url(url)


def _explain_error(error: Exception, filesystem: AbstractFileSystem, path: str, url: str) -> str:
    """Explains why the files of a URL cannot be listed."""
    if isinstance(error, FileNotFoundError):
        cause = error.__cause__
        # A web server that does not answer or denies access raises the same error. Only the cause differs.
        if cause is not None and not isinstance(cause, FileNotFoundError) and getattr(cause, "status", 0) != 404:
            return f"cannot read {url}: {cause}"
        return f"there is no file {url}{_suggest_files(filesystem, path)}"
    if isinstance(error, IsADirectoryError):
        return f"{url} is a directory; write which files in it, such as {url.rstrip('/')}/*.jsonl"
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if url.startswith("hf://"):
        problem = f"the Hugging Face hub gave no {url}: {type(error).__name__}: {reason}"
        return f"{problem}. Without network name local files"
    return f"cannot read {url}: {reason}"


def _suggest_files(filesystem: AbstractFileSystem, path: str) -> str:
    parent, _, name = path.rpartition("/")
    try:
        names = [str(entry).rstrip("/").rpartition("/")[2] for entry in filesystem.ls(parent or "/", detail=False)]
    except (OSError, NotImplementedError):
        return f" (the directory {parent} does not exist either)" if parent else ""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {parent}/{near[0]}?" if near else ""
