"""Documents of the training text of a run, read from its tokens.

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
from lm_trainer.data.provenance import passages_of_whole
from lm_trainer.data.tokenize.open_cache import OpenCache

_BATCH_TOKENS = 1 << 20

T = TypeVar("T")
R = TypeVar("R")


class Documents(NamedTuple):
    """Some documents of a set that follow one another; those that the data leave out are not among them."""

    set: str
    numbers_D: np.ndarray
    """int64: their numbers in the cache."""
    tokens_D: list[np.ndarray]
    """int32: the tokens of each, the one that ends it included."""

    def texts(self, texts_V: Sequence[bytes | None]) -> list[str]:
        """Their texts, from those of tokens as `token_texts` gives them."""
        pieces_V = [text or b"" for text in texts_V]
        return [
            b"".join([pieces_V[token] for token in tokens.tolist()]).decode("utf-8", "replace")
            for tokens in self.tokens_D
        ]


def train_caches(data: Data) -> dict[str, OpenCache]:
    """The caches of the sets that are trained on, in their order, by the names of the sets."""
    return {name: data.caches[f"{name}/train"] for name in data.config.trained}


def documents_of(name: str, cache: OpenCache) -> Iterator[Documents]:
    """Yields the documents of a set in batches."""
    lengths_D = document_lengths(cache.store, cache.ledger)
    ends_D = np.cumsum(lengths_D)
    kept_D = np.ones(len(lengths_D), bool)
    if cache.exclusion is not None:
        kept_D[cache.exclusion.documents_N] = False
    first = 0
    while first < len(lengths_D):
        start = int(ends_D[first] - lengths_D[first])
        last = max(int(np.searchsorted(ends_D, start + _BATCH_TOKENS, side="right")), first + 1)
        tokens = cache.whole.read(np.array([start]), int(ends_D[last - 1]) - start)[0]
        numbers_D = np.flatnonzero(kept_D[first:last]) + first
        found = [
            tokens[end - length - start : end - start]
            for end, length in zip(ends_D[numbers_D].tolist(), lengths_D[numbers_D].tolist(), strict=True)
        ]
        yield Documents(name, numbers_D, found)
        first = last


class Origins:
    """Says where documents come from, and how they begin."""

    def __init__(self, data: Data):
        self._data = data
        self._ends: dict[str, np.ndarray] = {}

    def passage(self, name: str, document: int, chars: int) -> tuple[str, str]:
        """The file and the line or row of a document, and about so many characters of it."""
        cache = self._data.caches[f"{name}/train"]
        if name not in self._ends:
            self._ends[name] = np.cumsum(document_lengths(cache.store, cache.ledger))
        ends = self._ends[name]
        start = int(ends[document - 1]) if document else 0
        count = min(int(ends[document]) - start, chars + 1)
        found = next(iter(passages_of_whole(cache, self._data.tokenizer, start, count)))
        return found.where, found.text[:chars]


def beside(batches: Iterator[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Yields each batch with what `work` makes of it, in order; a thread for each core does the work."""
    with ThreadPoolExecutor(available_cores()) as pool:
        waiting: list[tuple[T, Future[R]]] = []
        for batch in batches:
            waiting.append((batch, pool.submit(work, batch)))
            if len(waiting) > available_cores():
                first, done = waiting.pop(0)
                yield first, done.result()
        for first, done in waiting:
            yield first, done.result()
