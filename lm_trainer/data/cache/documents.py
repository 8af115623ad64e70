"""Where the documents of a cache begin, how long they are, and which rows they come from.

Shape letters: D documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lm_trainer.data.cache.format import Ledger, damaged, part_key, read_record
from lm_trainer.data.cache.kvstore import Store


def document_lengths(store: Store, ledger: Ledger) -> np.ndarray:
    """Tokens of each document in the order of the stream, end-of-document token included: int64 [D].

    Raises:
        MachineError: if the cache has lost a file.
    """
    lengths: list[np.ndarray] = []
    is_open = False
    for part, documents in enumerate(ledger.documents):
        pieces = read_lengths(store, ledger, part)
        if not len(pieces):
            continue
        unfinished = documents < len(pieces)
        if is_open:
            # The document went on in this part, in its first piece.
            lengths[-1][-1] += pieces[0]
            pieces = pieces[1:]
        is_open = unfinished
        if len(pieces):
            lengths.append(pieces)
    return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)


def read_lengths(store: Store, ledger: Ledger, part: int) -> np.ndarray:
    """Tokens of each document, or piece of one, in the part that the ledger lists at `part`: int64.

    Raises:
        MachineError: if the file is lost or damaged.
    """
    key = part_key(ledger.parts[part], "len")
    lengths = _read_counts(store, key).astype(np.int64)
    if int(lengths.sum()) != ledger.tokens[part]:
        raise damaged(store, key)
    return lengths


def read_rows(store: Store, ledger: Ledger, part: int) -> np.ndarray:
    """Of each document, or piece of one, in a part the row of the shard that it comes from: int64.

    Raises:
        MachineError: if a file is lost or damaged.
    """
    key = part_key(ledger.parts[part], "row")
    rows = _read_counts(store, key)
    if len(rows) != len(read_lengths(store, ledger, part)):
        raise damaged(store, key)
    return rows.astype(np.int64) + need_record(store, ledger, part)["rows"][0]


def need_record(store: Store, ledger: Ledger, part: int) -> dict[str, Any]:
    """The commit record of a part that the ledger lists.

    Raises:
        MachineError: if it is lost or damaged.
    """
    name = ledger.parts[part]
    record = read_record(store, name)
    if record is None:
        raise damaged(store, part_key(name, "json"), "is missing")
    return record


def begin_of(store: Store, ledger: Ledger, part: int) -> tuple[int, int]:
    """Where the document begins whose piece is the first of a part: the part of its first piece, and its tokens before.

    Raises:
        MachineError: if a file is lost or damaged.
    """
    before = 0
    while part and need_record(store, ledger, part)["continues"]:
        part -= 1
        pieces = read_lengths(store, ledger, part)
        before += int(pieces[-1]) if len(pieces) else 0
        if len(pieces) > 1:
            break
    return part, before


def _read_counts(store: Store, key: str) -> np.ndarray:
    content = store.read(key)
    if content is None:
        raise damaged(store, key, "is missing")
    if len(content) % 4:
        raise damaged(store, key)
    return np.frombuffer(content, "<u4")
