"""Contamination of an evaluation set: its runs of words (n-grams) that stand in the training text.

Ways in which the field reports it are given together. By that of GPT-3 (Brown et al., 2020, appendix C) a document is
contaminated if any run of 13 words stands in the training text. By those of Llama 2 and 3 (Touvron et al., 2023; Llama
team, 2024), the share of its words that are in such runs counts. The longest span tells best what a model gains by it
(Singh et al., "Evaluation data contamination in LLMs", 2024).

Shape letters: W words, G n-grams of the evaluation set, D documents, N n-grams of a piece of the training text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.corpus import Documents, beside, documents_of, train_caches
from lm_trainer.data.dataset import Data
from lm_trainer.data.ngrams import Words, ngrams_of, words_of

NGRAM = 13
DIRTY, CLEAN = 0.8, 0.2
"""The shares of words from which on a document counts as dirty, and up to which it counts as clean."""
_BITS = 24


class EvalDocument(NamedTuple):
    """A document of an evaluation set."""

    where: str
    text: str


class Overlap(NamedTuple):
    """A document of the evaluation set, and how much of it stands in the training text."""

    where: str
    words: int
    covered: int
    """Words in runs that stand in the training text."""
    longest: int
    """Words of the longest span all of whose runs do."""
    span: str
    """The text of that span."""
    found_in: tuple[tuple[str, int], ...]
    """The set and the number of a document with a run of that span, where there is one."""

    @property
    def share(self) -> float:
        """The share of its words that are covered."""
        return self.covered / self.words if self.words else 0.0


@dataclass(frozen=True)
class OverlapReport:
    """The contamination of an evaluation set."""

    ngram: int
    documents: list[Overlap]
    too_short: int
    """Documents of fewer words than a run, none of which can be found."""
    train_documents: dict[str, np.ndarray] = field(default_factory=dict)
    """Those of each set that hold any run of the evaluation set: int64, rising."""

    def count(self, least: float) -> int:
        """Documents of which more than nothing and at least such a share is covered."""
        return sum(each.covered > 0 and each.share >= least for each in self.documents)

    @property
    def share(self) -> float:
        """The share of all words that are covered."""
        return sum(each.covered for each in self.documents) / max(sum(each.words for each in self.documents), 1)


class _Index:
    """The runs of an evaluation set, looked up many at a time."""

    def __init__(self, hashes_G: np.ndarray):
        self.hashes = np.unique(hashes_G)
        # Nearly all runs of the training text are passed over by a look at a few bits.
        self._there = np.zeros(1 << _BITS, bool)
        self._there[self.hashes >> np.uint64(64 - _BITS)] = True

    def find(self, hashes_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places in `hashes_N` of those that are there, and their places in `hashes`."""
        near = np.flatnonzero(self._there.take((hashes_N >> np.uint64(64 - _BITS)).astype(np.intp)))
        places = np.minimum(np.searchsorted(self.hashes, hashes_N[near]), len(self.hashes) - 1)
        right = self.hashes[places] == hashes_N[near]
        return near[right], places[right]


def find_overlap(
    data: Data,
    documents: Iterable[EvalDocument],
    *,
    ngram: int = NGRAM,
    texts_V: Sequence[bytes | None],
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> OverlapReport:
    """Looks for every run of words of an evaluation set in the training text of all sets.

    Args:
        data: complete.
        documents: of the evaluation set.
        ngram: words of a run.
        texts_V: of `token_texts` of the data's tokenizer.
        progress: told the set, its documents that have been read, and all of them.

    Raises:
        UserError: where no document has so many words.
    """
    wanted = list(documents)
    words = words_of([each.text for each in wanted])
    hashes_G, firsts_G = ngrams_of(words, ngram)
    counts_D = np.bincount(words.documents_W, minlength=len(wanted))
    if not len(hashes_G):
        raise UserError(
            f"no document of the evaluation set has {ngram} words (the longest has "
            f"{max(counts_D.tolist(), default=0)}); choose shorter runs with --ngram"
        )
    index = _Index(hashes_G)
    owners = np.full(len(index.hashes), -1, np.int32)
    numbers = np.zeros(len(index.hashes), np.int64)

    def work(batch: Documents) -> tuple[np.ndarray, np.ndarray]:
        found = words_of(batch.texts(texts_V))
        hashes_N, firsts_N = ngrams_of(found, ngram)
        at_N, places = index.find(hashes_N)
        return places, batch.numbers_D[found.documents_W[firsts_N[at_N]]]

    train: dict[str, list[np.ndarray]] = {}
    for owner, (name, cache) in enumerate(train_caches(data).items()):
        for batch, (places, holders) in beside(documents_of(name, cache), work):
            new = owners[places] < 0
            # Backwards, so that of several the first stays.
            owners[places[new]], numbers[places[new][::-1]] = owner, holders[new][::-1]
            train.setdefault(name, []).append(holders)
            progress(name, int(batch.numbers_D[-1]) + 1 if len(batch.numbers_D) else 0, cache.ledger.num_documents)
    places_G = np.searchsorted(index.hashes, hashes_G)
    holders_G = [
        (data.config.trained[owner], number) if owner >= 0 else None
        for owner, number in zip(owners[places_G].tolist(), numbers[places_G].tolist(), strict=True)
    ]
    overlaps = _overlaps(wanted, words, counts_D, firsts_G, holders_G, ngram)
    short = int((counts_D < ngram).sum())
    holding = {name: np.unique(np.concatenate(each)) for name, each in train.items()}
    return OverlapReport(ngram, overlaps, short, holding)


def _overlaps(
    wanted: Sequence[EvalDocument],
    words: Words,
    counts_D: np.ndarray,
    firsts_G: np.ndarray,
    holders_G: Sequence[tuple[str, int] | None],
    ngram: int,
) -> list[Overlap]:
    """Sums up each document."""
    found_W = np.zeros(len(words.hashes_W) + 1, np.int64)
    holder_of = {int(first): holder for first, holder in zip(firsts_G, holders_G, strict=True) if holder is not None}
    firsts = np.fromiter(holder_of, np.int64, len(holder_of))
    np.add.at(found_W, firsts, 1)
    np.add.at(found_W, firsts + ngram, -1)
    covered_W = np.cumsum(found_W)[:-1] > 0
    is_found_W = np.zeros(len(covered_W), bool)
    is_found_W[firsts] = True
    begins_D = np.cumsum(counts_D) - counts_D
    overlaps = []
    for document, begin, count in zip(wanted, begins_D.tolist(), counts_D.tolist(), strict=True):
        start, runs = _longest_run(is_found_W[begin : begin + count])
        longest = runs + ngram - 1 if runs else 0
        holder = (holder_of[begin + start],) if runs else ()
        span = _span(document.text, words.starts_W[begin : begin + count], start, longest) if runs else ""
        covered = int(covered_W[begin : begin + count].sum())
        overlaps.append(Overlap(document.where, count, covered, longest, span, holder))
    return overlaps


def _longest_run(flags_W: np.ndarray) -> tuple[int, int]:
    """The beginning and the length of the first longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags_W.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _span(text: str, starts_W: np.ndarray, start: int, count: int) -> str:
    """The words [start, start + count) of a text as they stand there."""
    lowered = text.lower()
    # A few characters become two in lower case.
    shown = text if len(text) == len(lowered) else lowered
    end = int(starts_W[start + count]) if start + count < len(starts_W) else len(shown)
    return shown[int(starts_W[start]) : end].strip()
