"""Finds the beginnings, the lengths and the source rows of a cache's documents.

Shape letters: D documents, P documents or pieces of documents in one part.
"""

from __future__ import annotations

import numpy as np

from lm_trainer.data.cache.checksums import is_intact
from lm_trainer.data.cache.format import LEDGER, CommitRecord, damage_error, part_key, read_record
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger


def document_lengths(store: KvStore, ledger: Ledger) -> np.ndarray:
    """Reads the number of tokens of each document, including its end-of-document token, in stream order: int64 [D].

    Raises:
        MachineError: if the cache has lost a file.
    """
    lengths: list[np.ndarray] = []
    is_open = False
    for part, documents in enumerate(ledger.documents):
        pieces_P = read_lengths(store, ledger, part)
        if not len(pieces_P):
            continue
        # If fewer documents end in the part than it has pieces, the last piece continues in a later part.
        unfinished = documents < len(pieces_P)
        if is_open:
            # The first piece of this part continues the last document of the previous part.
            lengths[-1][-1] += pieces_P[0]
            pieces_P = pieces_P[1:]
        is_open = unfinished
        if len(pieces_P):
            lengths.append(pieces_P)
    return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)


def read_lengths(store: KvStore, ledger: Ledger, part: int) -> np.ndarray:
    """Reads the number of tokens of each document or piece in the part at index `part` of the ledger: int64 [P].

    Raises:
        MachineError: if the file is lost or damaged.
    """
    return _read_counts(store, ledger, part, "len")[0]


def read_rows(store: KvStore, ledger: Ledger, part: int) -> np.ndarray:
    """Reads the row in the shard of each document or piece of a part: int64 [P].

    Raises:
        MachineError: if a file is lost or damaged.
    """
    rows_P, record = _read_counts(store, ledger, part, "row")
    # The file counts rows from the part's first row, which the record gives.
    return rows_P + record["rows"][0]


def read_required_record(store: KvStore, ledger: Ledger, part: int) -> CommitRecord:
    """Reads the commit record of a part listed in the ledger.

    Raises:
        MachineError: if the record is lost or damaged, or does not match the ledger.
    """
    name = ledger.parts[part]
    record = read_record(store, name)
    if record is None:
        raise damage_error(store, part_key(name, "json"), "is missing")
    if not ledger.matches_record(part, record):
        raise damage_error(store, part_key(name, "json"), f"does not fit {LEDGER}")
    return record


def find_first_piece(store: KvStore, ledger: Ledger, part: int) -> tuple[int, int]:
    """Finds the beginning of the document that the first piece of a part continues.

    Returns:
        The index of the part with the document's first piece, and the number of the document's tokens before `part`.

    Raises:
        MachineError: if a file is lost or damaged.
    """
    tokens_before = 0
    while part and read_required_record(store, ledger, part)["continues"]:
        part -= 1
        pieces_P = read_lengths(store, ledger, part)
        tokens_before += int(pieces_P[-1]) if len(pieces_P) else 0
        # In a part of several pieces, the document begins with the last piece.
        if len(pieces_P) > 1:
            break
    return part, tokens_before


def _read_counts(store: KvStore, ledger: Ledger, part: int, kind: str) -> tuple[np.ndarray, CommitRecord]:
    """Reads a file with one number per document or piece, int64 [P], and the commit record of its part."""
    key = part_key(ledger.parts[part], kind)
    content = store.read(key)
    if content is None:
        raise damage_error(store, key, "is missing")
    record = read_required_record(store, ledger, part)
    if not is_intact(content, record["blobs"][kind]):
        raise damage_error(store, key)
    return np.frombuffer(content, "<u4").astype(np.int64), record
