"""Reads the documents of a run's training text from its tokens.

Shape letters: D documents, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from lm_trainer.core.runtime import available_cores
from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.dataset import Data
from lm_trainer.data.provenance import iter_full_stream_passages
from lm_trainer.data.tokenize.open_cache import OpenCache

_BATCH_TOKENS = 1 << 20

T = TypeVar("T")
R = TypeVar("R")


class Documents(NamedTuple):
    """A run of consecutive documents of a set, without excluded documents."""

    set: str
    numbers_D: np.ndarray
    """int64: numbers of the documents in the cache."""
    tokens_D: list[np.ndarray]
    """int32: tokens of each document, including its end-of-document token."""

    def decode_texts(self, texts_V: Sequence[bytes | None]) -> list[str]:
        """Decodes the documents with the token texts returned by `token_texts`."""
        pieces_V = [text or b"" for text in texts_V]
        return [
            b"".join([pieces_V[token] for token in tokens.tolist()]).decode("utf-8", "replace")
            for tokens in self.tokens_D
        ]


def train_caches(data: Data) -> dict[str, OpenCache]:
    """Returns the caches of the sets to train on in order, keyed by set name."""
    return {name: data.caches[f"{name}/train"] for name in data.config.trained}


def iter_documents(name: str, cache: OpenCache) -> Iterator[Documents]:
    """Yields batches of the documents of a set."""
    lengths_D = document_lengths(cache.store, cache.ledger)
    ends_D = np.cumsum(lengths_D)
    retained_D = np.ones(len(lengths_D), bool)
    if cache.exclusion is not None:
        retained_D[cache.exclusion.documents_N] = False
    first = 0
    while first < len(lengths_D):
        start = int(ends_D[first] - lengths_D[first])
        last = max(int(np.searchsorted(ends_D, start + _BATCH_TOKENS, side="right")), first + 1)
        tokens = cache.whole.read(np.array([start]), int(ends_D[last - 1]) - start)[0]
        numbers_D = np.flatnonzero(retained_D[first:last]) + first
        tokens_D = [
            tokens[end - length - start : end - start]
            for end, length in zip(ends_D[numbers_D].tolist(), lengths_D[numbers_D].tolist(), strict=True)
        ]
        yield Documents(name, numbers_D, tokens_D)
        first = last


class Origins:
    """Looks up the sources and the beginnings of documents."""

    def __init__(self, data: Data):
        self._data = data
        self._ends: dict[str, np.ndarray] = {}

    def find_passage(self, name: str, document: int, chars: int) -> tuple[str, str]:
        """Returns the file and the line or row of a document, and approximately its first `chars` characters."""
        cache = self._data.caches[f"{name}/train"]
        if name not in self._ends:
            self._ends[name] = np.cumsum(document_lengths(cache.store, cache.ledger))
        ends = self._ends[name]
        start = int(ends[document - 1]) if document else 0
        count = min(int(ends[document]) - start, chars + 1)
        passage = next(iter(iter_full_stream_passages(cache, self._data.tokenizer, start, count)))
        return passage.where, passage.text[:chars]


def map_in_order(batches: Iterator[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Yields each batch with the result of `work`, in order. `work` runs in one thread per core."""
    with ThreadPoolExecutor(available_cores()) as pool:
        pending: list[tuple[T, Future[R]]] = []
        for batch in batches:
            pending.append((batch, pool.submit(work, batch)))
            if len(pending) > available_cores():
                first, done = pending.pop(0)
                yield first, done.result()
        for first, done in pending:
            yield first, done.result()
