"""Lists of documents to exclude from training. They are files of JSON lines, made for the tokens of certain caches.

    {"format": 1, "sets": {"wiki": {"documents": 6407814, "tokens": "94eff5d10d41cc82"}}}
    {"set": "wiki", "document": 17, "tokens": 812, "why": "exact", "like": {"set": "wiki", "document": 3}}

The first line identifies the tokens for which the document numbers are valid. In the other lines, only `set` and
`document` are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.cache.ledger import Ledger

_FORMAT = 1


@dataclass(frozen=True)
class Exclusion:
    """The documents of one set that are excluded from training."""

    documents_N: np.ndarray
    """int64 [N], numbers of the documents in the cache, in increasing order."""
    made_for: Mapping[str, tuple[int, str]]
    """Maps the file of each list to the number of documents and the token hash for which it was made."""
    key: str = "data.exclude"
    """Key of the configuration that names the lists, for messages."""

    @cached_property
    def digest(self) -> str:
        """Hash of the document numbers, independent of the files that list them."""
        return hashlib.sha256(self.documents_N.astype("<i8").tobytes()).hexdigest()[:16]

    def check_matches_cache(self, name: str, ledger: Ledger, documents: int) -> None:
        """Checks that the lists were made for this cache.

        Args:
            name: name of the set, for messages.
            ledger: ledger of the cache.
            documents: number of documents in the cache, including an unterminated one at the end.

        Raises:
            UserError: if a list was made for other tokens, or contains a nonexistent document.
        """
        for file, (num_listed, tokens) in self.made_for.items():
            if tokens != hash_tokens(ledger):
                raise UserError(
                    f"{self.key}: {file} was made for other data than {name}: for {num_listed:,} documents of the "
                    f"tokens {tokens}, and these are {documents:,} of {hash_tokens(ledger)}; make it again "
                    "with: lmt data dedup"
                )
        if len(self.documents_N) and self.documents_N[-1] >= documents:
            raise UserError(
                f"{self.key}: there is no document {self.documents_N[-1]} in {name}, which has "
                f"{documents:,}, counted from 0"
            )


def hash_tokens(ledger: Ledger) -> str:
    """Returns the hash of all tokens of a finished cache."""
    return fingerprint(ledger.sha256)


def read_exclusions(files: Sequence[str], sets: Iterable[str], key: str = "data.exclude") -> dict[str, Exclusion]:
    """Reads lists, and merges their entries for each set.

    Args:
        files: paths of the lists.
        sets: names of all sets to train on.
        key: key of the configuration that names the lists, for messages.

    Raises:
        UserError: if a file is invalid; names the invalid line.
    """
    set_names, numbers = list(sets), dict[str, list[np.ndarray]]()
    made_for: dict[str, dict[str, tuple[int, str]]] = {}
    for file in files:
        header, excluded = _read_list(file, key)
        if missing := [name for name in header if name not in set_names]:
            raise UserError(
                f"{key}: {file} is for the set {missing[0]}, which is not trained on; there are {', '.join(set_names)}"
            )
        for name, about in header.items():
            made_for.setdefault(name, {})[file] = about
            numbers.setdefault(name, []).append(np.array(excluded[name], np.int64))
    return {name: Exclusion(np.unique(np.concatenate(arrays)), made_for[name], key) for name, arrays in numbers.items()}


def _read_list(file: str, key: str) -> tuple[dict[str, tuple[int, str]], dict[str, list[int]]]:
    line = 1
    try:
        with local_path(file).open(encoding="utf-8") as lines:
            header = json.loads(next(lines, ""))
            if header["format"] != _FORMAT:
                raise UserError(f"{key}: {file} has the format {header['format']}, this version reads {_FORMAT}")
            sets = {name: (int(about["documents"]), str(about["tokens"])) for name, about in header["sets"].items()}
            numbers: dict[str, list[int]] = {name: [] for name in sets}
            for line, text in enumerate(lines, start=2):  # noqa: B007
                entry = json.loads(text)
                number = entry["document"]
                if type(number) is not int or number < 0:
                    raise ValueError("`document` is no number from 0")
                numbers[entry["set"]].append(number)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}: cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{key}: {file}:{line} is no line of a list of documents ({reason}); lmt data dedup and "
            "lmt data overlap write such lists"
        ) from None
    return sets, numbers


def write_exclusions(file: Path, ledgers: Mapping[str, Ledger], entries: Iterable[Mapping[str, object]]) -> None:
    """Writes a list atomically.

    Args:
        file: path of the list.
        ledgers: ledgers of all sets that may occur in the list.
        entries: lines with the keys `set`, `document` and any others.

    Raises:
        UserError: if the list cannot be written.
    """
    sets = {
        name: {"documents": ledger.num_documents, "tokens": hash_tokens(ledger)} for name, ledger in ledgers.items()
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
