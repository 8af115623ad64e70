"""Documents of a cache: where they begin, how long they are, and which rows of the source they come from.

Shape letters: D documents, P documents or pieces of documents in one part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lm_trainer.data.cache.checksums import is_intact
from lm_trainer.data.cache.format import LEDGER, damaged, part_key, read_record
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger


def document_lengths(store: KvStore, ledger: Ledger) -> np.ndarray:
    """Reads the tokens of each document in the order of the stream, end-of-document token included: int64 [D].

    Raises:
        MachineError: if the cache has lost a file.
    """
    lengths: list[np.ndarray] = []
    is_open = False
    for part, documents in enumerate(ledger.documents):
        pieces_P = read_lengths(store, ledger, part)
        if not len(pieces_P):
            continue
        # Fewer documents end in the part than it has pieces: the last piece goes on in a later part.
        unfinished = documents < len(pieces_P)
        if is_open:
            # The document went on in this part, in its first piece.
            lengths[-1][-1] += pieces_P[0]
            pieces_P = pieces_P[1:]
        is_open = unfinished
        if len(pieces_P):
            lengths.append(pieces_P)
    return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)


def read_lengths(store: KvStore, ledger: Ledger, part: int) -> np.ndarray:
    """Reads the tokens of each document, or piece of one, in the part that the ledger lists at `part`: int64 [P].

    Raises:
        MachineError: if the file is lost or damaged.
    """
    return _read_counts(store, ledger, part, "len")[0]


def read_rows(store: KvStore, ledger: Ledger, part: int) -> np.ndarray:
    """Reads the row of the shard that each document, or piece of one, of a part comes from: int64 [P].

    Raises:
        MachineError: if a file is lost or damaged.
    """
    rows_P, record = _read_counts(store, ledger, part, "row")
    # The file counts from the part's first row, whose number is in the record.
    return rows_P + record["rows"][0]


def need_record(store: KvStore, ledger: Ledger, part: int) -> dict[str, Any]:
    """Reads the commit record of a part that the ledger lists.

    Raises:
        MachineError: if it is lost or damaged, or is not the one that the ledger was made of.
    """
    name = ledger.parts[part]
    record = read_record(store, name)
    if record is None:
        raise damaged(store, part_key(name, "json"), "is missing")
    if not ledger.fits(part, record):
        raise damaged(store, part_key(name, "json"), f"does not fit {LEDGER}")
    return record


def begin_of(store: KvStore, ledger: Ledger, part: int) -> tuple[int, int]:
    """Finds the beginning of the document whose piece is the first of a part.

    Returns:
        The part of the document's first piece, and the document's tokens before `part`.

    Raises:
        MachineError: if a file is lost or damaged.
    """
    before = 0
    while part and need_record(store, ledger, part)["continues"]:
        part -= 1
        pieces_P = read_lengths(store, ledger, part)
        before += int(pieces_P[-1]) if len(pieces_P) else 0
        # In a part of several pieces, the last one is the beginning of the document.
        if len(pieces_P) > 1:
            break
    return part, before


def _read_counts(store: KvStore, ledger: Ledger, part: int, kind: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Reads a file of one number for each document or piece, int64 [P], and the commit record."""
    key = part_key(ledger.parts[part], kind)
    content = store.read(key)
    if content is None:
        raise damaged(store, key, "is missing")
    record = need_record(store, ledger, part)
    if not is_intact(content, record["blobs"][kind]):
        raise damaged(store, key)
    return np.frombuffer(content, "<u4").astype(np.int64), record
