"""URLs of a configuration: the list of existing files that they name."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded, variable_problem
from lm_trainer.data.sources.compression import why_not_unpacked
from lm_trainer.data.sources.files import File, check_listed, file_at, file_system, is_file

_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def expand_braces(url: str) -> list[str]:
    """Expands `{1..128}`, `{001..128}` and `{a,b}` as a shell does, leftmost slowest.

    Braces with neither a range nor a comma stay as they are.
    """
    for match in _BRACE.finditer(url):
        body = match[1]
        if numbers := _RANGE.fullmatch(body):
            options = _numbers(numbers[1], numbers[2])
        elif "," in body:
            options = body.split(",")
        else:
            continue
        head, tail = url[: match.start()], url[match.end() :]
        return [head + option + rest for option in options for rest in expand_braces(tail)]
    return [url]


def _numbers(first: str, last: str) -> list[str]:
    start, stop = int(first), int(last)
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if stop >= start else -1
    return [f"{number:0{width}d}" for number in range(start, stop + step, step)]


def list_files(urls: Sequence[str], key: str) -> list[File]:
    """Lists the files that `urls` name, in the order of the list; the matches of one glob are sorted by name.

    Args:
        urls: paths, fsspec URLs, globs and braces. The path of a file that exists here is that file and nothing else.
        key: the configuration key that holds them, for messages.

    Raises:
        UserError: for anything that does not exist, is a directory, is listed twice, or is packed in a way that is not
            read.
    """
    return [file for _, files in match_files(urls, key) for file in files]


_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
"""The extra of lm_trainer that brings what the URLs of a scheme need."""


def match_files(urls: Sequence[str], key: str) -> list[tuple[str, list[File]]]:
    """Lists files as `list_files` does, as (path, URL or glob; its files)."""
    names = [name for url in urls for name in ([url] if is_file(url) else expand_braces(url))]
    matches = [(name, _find(name, key)) for name in names]
    seen: dict[str, str] = {}
    for file in (file for _, files in matches for file in files):
        if (before := seen.get(place := _place(file))) is not None:
            other = f" (as {before} before)" if before != file.name else ""
            raise UserError(f"{key}: {file.name} is listed twice{other}; each file may appear once")
        seen[place] = file.name
        if (reason := why_not_unpacked(file.url)) is not None:
            raise UserError(f"{key}: {file.name} {reason}")
    return matches


def _place(file: File) -> str:
    """Returns the place of a file, the same for every way to write its path.

    A link to a file is a file of its own: caches of the hub keep equal files as links to one.
    """
    if not file.local and not file.url.startswith("file://"):
        return file.url
    directory, name = os.path.split(os.path.abspath(file.url.removeprefix("file://")))
    return os.path.join(os.path.realpath(directory), name)


def _file_system(url: str, key: str) -> tuple[Any, str]:
    """Returns the file system of fsspec that `url` names, and the path in it."""
    try:
        return file_system(url, local=is_file(url))
    except ImportError as error:
        if url.startswith(("http://", "https://")):
            raise UserError(f"{key}: {url} needs a package; run: pip install aiohttp") from None
        if (extra := _EXTRAS.get(url.partition("://")[0])) is not None:
            raise UserError(f"{key}: {url} needs a package; run: pip install 'lm_trainer[{extra}]'") from None
        raise UserError(f"{key}: {url} needs a package that is not installed: {error}") from None
    except Exception as error:
        # A chained URL is opened as it is parsed, and each file system fails in a way of its own.
        raise UserError(f"{key}: cannot open {url}: {str(error) or type(error).__name__}") from None


def _find(url: str, key: str) -> list[File]:
    # A query of a URL may have a `$` of its own.
    if "://" not in url and not is_file(url) and (problem := variable_problem(url)):
        raise UserError(f"{key}: {problem}")
    url = expanded(url)
    filesystem, path = _file_system(url, key)
    try:
        if not is_file(url) and any(character in path for character in "*?["):
            paths = sorted(p for p in filesystem.glob(path) if not filesystem.isdir(p))
            if not paths:
                raise UserError(f"{key}: no file matches {url}")
            return [file_at(filesystem, p, _matched(filesystem, p, url)) for p in paths]
        return [file_at(filesystem, path, url)]
    except UserError:
        raise
    # OSError, and the errors that the package of a file system has of its own.
    except Exception as error:
        raise UserError(f"{key}: {_explain(error, filesystem, path, url)}") from None


def _matched(filesystem: Any, path: str, glob: str) -> str:
    """Returns the URL of a file that a glob found."""
    if "://" not in glob:
        return path
    url = filesystem.unstrip_protocol(path)
    return url if "::" in glob else check_listed(url)


def _explain(error: Exception, filesystem: Any, path: str, url: str) -> str:
    """Says why the files of a URL cannot be listed."""
    if isinstance(error, FileNotFoundError):
        cause = error.__cause__
        # The same error comes of a web server that does not answer or forbids access: only its cause tells them apart.
        if cause is not None and not isinstance(cause, FileNotFoundError) and getattr(cause, "status", 0) != 404:
            return f"cannot read {url}: {cause}"
        return f"there is no file {url}{_did_you_mean(filesystem, path)}"
    if isinstance(error, IsADirectoryError):
        return f"{url} is a directory; write which files in it, such as {url.rstrip('/')}/*.jsonl"
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if url.startswith("hf://"):
        problem = f"the Hugging Face hub gave no {url}: {type(error).__name__}: {reason}"
        return f"{problem}. Without network name local files"
    return f"cannot read {url}: {reason}"


def _did_you_mean(filesystem: Any, path: str) -> str:
    parent, _, name = path.rpartition("/")
    try:
        names = [str(entry).rstrip("/").rpartition("/")[2] for entry in filesystem.ls(parent or "/", detail=False)]
    except (OSError, NotImplementedError):
        return f" (the directory {parent} does not exist either)" if parent else ""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {parent}/{near[0]}?" if near else ""
