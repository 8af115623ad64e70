"""Lists of documents that training leaves out: files of JSON lines, made for the tokens of certain caches.

    {"format": 1, "sets": {"wiki": {"documents": 6407814, "tokens": "94eff5d10d41cc82"}}}
    {"set": "wiki", "document": 17, "tokens": 812, "why": "exact", "like": {"set": "wiki", "document": 3}}

The first line says for which tokens the numbers of documents hold. Of the others, `set` and `document` count alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.cache.ledger import Ledger

_FORMAT = 1


@dataclass(frozen=True)
class Exclusion:
    """The documents of one set that training leaves out."""

    documents_N: np.ndarray
    """int64 [N], their numbers in the cache, rising."""
    made_for: Mapping[str, tuple[int, str]]
    """The file of each list -> the documents and the hash of the tokens that it was made for."""

    @cached_property
    def digest(self) -> str:
        """A hash of the numbers, whatever files they came from."""
        return hashlib.sha256(self.documents_N.astype("<i8").tobytes()).hexdigest()[:16]

    def check(self, name: str, ledger: Ledger, documents: int) -> None:
        """Makes sure that the lists are of this cache.

        Args:
            name: of the set, for messages.
            ledger: of the cache.
            documents: in the cache, one that no token ends included.

        Raises:
            UserError: where one was made for other tokens, or names a document that is not there.
        """
        for file, (others, tokens) in self.made_for.items():
            if tokens != tokens_hash(ledger):
                raise UserError(
                    f"data.exclude: {file} was made for other data than {name}: for {others:,} documents of the "
                    f"tokens {tokens}, and these are {documents:,} of {tokens_hash(ledger)}; make it again "
                    "with: lmt data dedup"
                )
        if len(self.documents_N) and self.documents_N[-1] >= documents:
            raise UserError(
                f"data.exclude: there is no document {self.documents_N[-1]} in {name}, which has "
                f"{documents:,}, counted from 0"
            )


def tokens_hash(ledger: Ledger) -> str:
    """A hash of all tokens of a finished cache."""
    return fingerprint(ledger.sha256)


def read_exclusions(files: Sequence[str], sets: Iterable[str]) -> dict[str, Exclusion]:
    """Reads lists, joined, for those of the sets that they name.

    Args:
        files: their paths.
        sets: the names of all sets that are trained on.

    Raises:
        UserError: for a file that is no such list, with its line.
    """
    known, numbers = list(sets), dict[str, list[np.ndarray]]()
    made_for: dict[str, dict[str, tuple[int, str]]] = {}
    for file in files:
        header, excluded = _read(file)
        if missing := [name for name in header if name not in known]:
            raise UserError(
                f"data.exclude: {file} is for the set {missing[0]}, which is not trained on; there are "
                f"{', '.join(known)}"
            )
        for name, about in header.items():
            made_for.setdefault(name, {})[file] = about
            numbers.setdefault(name, []).append(np.array(excluded[name], np.int64))
    return {name: Exclusion(np.unique(np.concatenate(found)), made_for[name]) for name, found in numbers.items()}


def _read(file: str) -> tuple[dict[str, tuple[int, str]], dict[str, list[int]]]:
    line = 1
    try:
        with local_path(file).open(encoding="utf-8") as lines:
            header = json.loads(next(lines, ""))
            if header["format"] != _FORMAT:
                raise UserError(f"data.exclude: {file} has the format {header['format']}, this version reads {_FORMAT}")
            sets = {name: (int(about["documents"]), str(about["tokens"])) for name, about in header["sets"].items()}
            found: dict[str, list[int]] = {name: [] for name in sets}
            for line, each in enumerate(lines, start=2):  # noqa: B007
                entry = json.loads(each)
                number = entry["document"]
                if type(number) is not int or number < 0:
                    raise ValueError("`document` is no number from 0")
                found[entry["set"]].append(number)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.exclude: cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"data.exclude: {file}:{line} is no line of a list of documents ({what}); lmt data dedup and "
            "lmt data overlap write such lists"
        ) from None
    return sets, found


def write_exclusions(file: Path, ledgers: Mapping[str, Ledger], entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a list, whole or not at all.

    Args:
        file: its path.
        ledgers: of the sets whose documents may be named.
        entries: lines with `set`, `document` and whatever else is to stand there.

    Raises:
        UserError: where it cannot be written.
    """
    sets = {
        name: {"documents": ledger.num_documents, "tokens": tokens_hash(ledger)} for name, ledger in ledgers.items()
    }
    draft = file.with_name(f".{file.name}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as out:
            out.write(json.dumps({"format": _FORMAT, "sets": sets}) + "\n")
            out.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(f"cannot write {file}: {error.strerror or error}") from None
