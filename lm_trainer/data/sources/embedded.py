"""The embedded corpus, which every Python installation includes: the standard library and the language reference."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split

NUM_SHARDS = 8

_TEST_DIRECTORIES = {"test", "tests", "idle_test", "__pycache__"}
_TOPICS = "pydoc_data/topics.py"
_SMALLEST_CORPUS = 1 << 20


class LibraryDocument(NamedTuple):
    """One module of the library, or one topic of the language reference (`pydoc_data/topics/NAME`)."""

    name: str
    size: int
    sha256: str


class Embedded(SourceConfig):
    """Text that requires no network or download: the modules of the running Python and its language reference.

    It has about 12 MB. About 5 % of the documents, selected by a hash of their names, are the validation set.
    """

    type: Literal["embedded"] = "embedded"
    max_bytes: int | None = Field(default=None, ge=1 << 16)
    """Approximate number of bytes to use, selected by a hash of the documents' names; null means the full corpus."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Fraction of the documents to hold out for validation."""

    takes_urls: ClassVar[bool] = False
    has_fields: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls, text_key, fields
        # Selected by a hash of the name, so that a document keeps its split when other documents are added or removed.
        held_out = self.validation_fraction * 2**32
        documents, total = [], 0
        for document in sorted(list_library_documents(), key=lambda document: _hash_name(f"sample/{document.name}")):
            total += document.size
            if self.max_bytes is not None and total > self.max_bytes:
                break
            if (_hash_name(document.name) < held_out) == (split == "validation"):
                documents.append(document)
        documents.sort()
        if not documents:
            raise UserError(f"data.source: nothing is left for {split}; raise max_bytes or change validation_fraction")
        return [EmbeddedShard(part) for part in _split_evenly(documents, NUM_SHARDS)]


@dataclass(frozen=True)
class EmbeddedShard:
    """One or more documents, sorted by name. Each row is a document."""

    documents: tuple[LibraryDocument, ...]

    @property
    def size(self) -> int:
        return sum(document.size for document in self.documents)

    @property
    def text_size(self) -> int:
        return self.size

    def identity(self) -> dict[str, object]:
        digest = hashlib.sha256(repr([tuple(document) for document in self.documents]).encode()).hexdigest()
        return {"type": "embedded", "documents": len(self.documents), "bytes": self.size, "sha256": digest}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number, document in enumerate(self.documents[start:], start):
            yield Row(number, document.name, _read_bytes(document.name).decode("utf-8"))


@lru_cache(maxsize=1)
def list_library_documents() -> tuple[LibraryDocument, ...]:
    """Lists every document of the corpus, sorted by name.

    Raises:
        UserError: if this Python installation has no readable sources (it is zipped or stripped).
    """
    root = _library_root()
    documents = []
    for directory, subdirectories, files in os.walk(root):
        relative = Path(directory).relative_to(root)
        # `os.walk` descends only into the directories left in its list.
        subdirectories[:] = [name for name in subdirectories if _is_library_file(relative / name)]
        names = [relative / name for name in files if name.endswith(".py") and _is_library_file(relative / name)]
        documents += [document for name in names if (document := _load_document(name.as_posix()))]
    documents += [document for topic in _read_topics() if (document := _load_document(f"pydoc_data/topics/{topic}"))]
    if sum(document.size for document in documents) < _SMALLEST_CORPUS:
        raise UserError(
            f"the Python at {sys.executable} carries too few readable sources in {root} to train on; "
            "name your own files with data.train_urls, or use a full Python installation"
        )
    return tuple(sorted(documents))


# Called for every document; Python computes its paths again at each call.
@lru_cache(maxsize=1)
def _library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _is_library_file(path: Path) -> bool:
    """Returns True for files of the library, except tests, installed packages and files generated for this machine."""
    if path.as_posix() == _TOPICS or path.name in _TEST_DIRECTORIES:
        return False
    return path.parts[0].removesuffix(".py") in sys.stdlib_module_names


def _load_document(name: str) -> LibraryDocument | None:
    """Returns a document; None for an empty file, and for the few files that are not UTF-8."""
    try:
        content = _read_bytes(name)
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return LibraryDocument(name, len(content), hashlib.sha256(content).hexdigest()) if content else None


def _read_bytes(name: str) -> bytes:
    path, _, topic = name.rpartition("/")
    if path == _TOPICS.removesuffix(".py"):
        return _read_topics()[topic].encode("utf-8")
    return (_library_root() / name).read_bytes()


def _read_topics() -> dict[str, str]:
    """Returns the topics of the language reference by name. Some distributions do not include them."""
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}


def _hash_name(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _split_evenly(documents: Sequence[LibraryDocument], parts: int) -> list[tuple[LibraryDocument, ...]]:
    """Splits the list into at most `parts` runs of about equal size."""
    total, size_before = sum(document.size for document in documents), 0
    runs: list[list[LibraryDocument]] = [[] for _ in range(parts)]
    for document in documents:
        runs[min(parts - 1, size_before * parts // total)].append(document)
        size_before += document.size
    return [tuple(run) for run in runs if run]
