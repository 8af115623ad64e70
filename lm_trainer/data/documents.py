"""Where the documents of a cache begin and how long they are.

Shape letters: D documents.
"""

from __future__ import annotations

import numpy as np

from lm_trainer.core.errors import MachineError
from lm_trainer.data.layout import Ledger, part_key
from lm_trainer.data.store import Store


def document_lengths(store: Store, ledger: Ledger) -> np.ndarray:
    """Tokens of each document in the order of the stream, end-of-document token included: int64 [D].

    Raises:
        MachineError: if the cache has lost a file.
    """
    lengths: list[np.ndarray] = []
    is_open = False
    for name, documents, tokens in zip(ledger.parts, ledger.documents, ledger.tokens, strict=True):
        pieces = read_lengths(store, name)
        if int(pieces.sum()) != tokens:
            raise MachineError(f"{store.url}/{part_key(name, 'len')} is damaged; remove {store.url} to build it again")
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


def read_lengths(store: Store, name: str) -> np.ndarray:
    """Tokens of each document, or piece of one, in a part: int64."""
    content = store.read(part_key(name, "len"))
    if content is None:
        raise MachineError(f"the cache has lost {part_key(name, 'len')}. Remove {store.url} to build it again")
    return np.frombuffer(content, "<u4").astype(np.int64)
