"""Measures the contamination of an evaluation set by its word n-grams that also occur in the training text.

Reports several metrics of the literature. For GPT-3 (Brown et al., 2020, appendix C), a document is contaminated if any
of its 13-grams occurs in the training text. For Llama 2 and 3 (Touvron et al., 2023; Llama team, 2024), contamination
is the fraction of a document's words in such n-grams. The longest span of such n-grams best predicts how much a model
gains from contamination (Singh et al., "Evaluation data contamination in LLMs", 2024).

Shape letters: W words, G n-grams of the evaluation set, D documents, N n-grams of a piece of the training text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.corpus import Documents, iter_documents, map_in_order, train_caches
from lm_trainer.data.dataset import Data
from lm_trainer.data.ngrams import Words, hash_ngrams, hash_words

NGRAM = 13
DIRTY, CLEAN = 0.8, 0.2
"""Minimum fraction of covered words in a dirty document, and maximum fraction in a clean document."""
_BITS = 24


class EvalDocument(NamedTuple):
    """A document of an evaluation set."""

    where: str
    text: str


class Overlap(NamedTuple):
    """The amount of an evaluation document that occurs in the training text."""

    where: str
    words: int
    covered: int
    """Number of words in n-grams that occur in the training text."""
    longest: int
    """Number of words of the longest span in which all n-grams occur in the training text."""
    span: str
    """The text of the longest span."""
    found_in: tuple[tuple[str, int], ...]
    """The set and the number of a document that has an n-gram of this span, if any."""

    @property
    def share(self) -> float:
        """Fraction of the document's words that are covered."""
        return self.covered / self.words if self.words else 0.0


@dataclass(frozen=True)
class OverlapReport:
    """The contamination of an evaluation set."""

    ngram: int
    documents: list[Overlap]
    too_short: int
    """Number of documents that are shorter than an n-gram, so they cannot match."""
    train_documents: dict[str, np.ndarray] = field(default_factory=dict)
    """Numbers of the documents of each set that have any n-gram of the evaluation set: int64, increasing."""

    def count_at_least(self, least: float) -> int:
        """Returns the number of documents that have covered words, with at least the fraction `least` covered."""
        return sum(overlap.covered > 0 and overlap.share >= least for overlap in self.documents)

    @property
    def share(self) -> float:
        """Fraction of all words that are covered."""
        return sum(overlap.covered for overlap in self.documents) / max(
            sum(overlap.words for overlap in self.documents), 1
        )


class _HashIndex:
    """The n-grams of an evaluation set, with vectorised lookup."""

    def __init__(self, hashes_G: np.ndarray):
        self.hashes = np.unique(hashes_G)
        # A few bits of the hash suffice to skip nearly all n-grams of the training text.
        self._bucket_used = np.zeros(1 << _BITS, bool)
        self._bucket_used[self.hashes >> np.uint64(64 - _BITS)] = True

    def find_known(self, hashes_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of known hashes in `hashes_N`, and their indices in `hashes`."""
        near = np.flatnonzero(self._bucket_used.take((hashes_N >> np.uint64(64 - _BITS)).astype(np.intp)))
        indices = np.minimum(np.searchsorted(self.hashes, hashes_N[near]), len(self.hashes) - 1)
        is_hit = self.hashes[indices] == hashes_N[near]
        return near[is_hit], indices[is_hit]


def find_overlap(
    data: Data,
    documents: Iterable[EvalDocument],
    *,
    ngram: int = NGRAM,
    texts_V: Sequence[bytes | None],
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> OverlapReport:
    """Looks for every n-gram of an evaluation set in the training text of all sets.

    Args:
        data: complete data of the run.
        documents: documents of the evaluation set.
        ngram: number of words per n-gram.
        texts_V: text of each token, from `token_texts` of the data's tokenizer.
        progress: called with the name of a set, the number of its documents read so far, and their total number.

    Raises:
        UserError: if no document is long enough.
    """
    eval_documents = list(documents)
    words = hash_words([document.text for document in eval_documents])
    hashes_G, firsts_G = hash_ngrams(words, ngram)
    counts_D = np.bincount(words.documents_W, minlength=len(eval_documents))
    if not len(hashes_G):
        raise UserError(
            f"no document of the evaluation set has {ngram} words (the longest has "
            f"{max(counts_D.tolist(), default=0)}); choose shorter runs with --ngram"
        )
    index = _HashIndex(hashes_G)
    owners = np.full(len(index.hashes), -1, np.int32)
    numbers = np.zeros(len(index.hashes), np.int64)

    def find_ngrams(batch: Documents) -> tuple[np.ndarray, np.ndarray]:
        batch_words = hash_words(batch.decode_texts(texts_V))
        hashes_N, firsts_N = hash_ngrams(batch_words, ngram)
        hits_N, indices = index.find_known(hashes_N)
        return indices, batch.numbers_D[batch_words.documents_W[firsts_N[hits_N]]]

    train: dict[str, list[np.ndarray]] = {}
    for owner, (name, cache) in enumerate(train_caches(data).items()):
        for batch, (indices, holders) in map_in_order(iter_documents(name, cache), find_ngrams):
            new = owners[indices] < 0
            # Assigned in reverse order, so that the first of several documents remains.
            owners[indices[new]], numbers[indices[new][::-1]] = owner, holders[new][::-1]
            train.setdefault(name, []).append(holders)
            progress(name, int(batch.numbers_D[-1]) + 1 if len(batch.numbers_D) else 0, cache.ledger.num_documents)
    places_G = np.searchsorted(index.hashes, hashes_G)
    holders_G = [
        (data.config.trained[owner], number) if owner >= 0 else None
        for owner, number in zip(owners[places_G].tolist(), numbers[places_G].tolist(), strict=True)
    ]
    overlaps = _compute_overlaps(eval_documents, words, counts_D, firsts_G, holders_G, ngram)
    short = int((counts_D < ngram).sum())
    train_documents = {name: np.unique(np.concatenate(batches)) for name, batches in train.items()}
    return OverlapReport(ngram, overlaps, short, train_documents)


def _compute_overlaps(
    eval_documents: Sequence[EvalDocument],
    words: Words,
    counts_D: np.ndarray,
    firsts_G: np.ndarray,
    holders_G: Sequence[tuple[str, int] | None],
    ngram: int,
) -> list[Overlap]:
    """Computes the overlap of each document."""
    delta_W = np.zeros(len(words.hashes_W) + 1, np.int64)
    holder_of = {int(first): holder for first, holder in zip(firsts_G, holders_G, strict=True) if holder is not None}
    firsts = np.fromiter(holder_of, np.int64, len(holder_of))
    np.add.at(delta_W, firsts, 1)
    np.add.at(delta_W, firsts + ngram, -1)
    covered_W = np.cumsum(delta_W)[:-1] > 0
    in_train_W = np.zeros(len(covered_W), bool)
    in_train_W[firsts] = True
    begins_D = np.cumsum(counts_D) - counts_D
    overlaps = []
    for document, begin, count in zip(eval_documents, begins_D.tolist(), counts_D.tolist(), strict=True):
        start, runs = _longest_run(in_train_W[begin : begin + count])
        longest = runs + ngram - 1 if runs else 0
        holder = (holder_of[begin + start],) if runs else ()
        span = _words_text(document.text, words.starts_W[begin : begin + count], start, longest) if runs else ""
        covered = int(covered_W[begin : begin + count].sum())
        overlaps.append(Overlap(document.where, count, covered, longest, span, holder))
    return overlaps


def _longest_run(flags_W: np.ndarray) -> tuple[int, int]:
    """Returns the beginning and the length of the first longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags_W.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _words_text(text: str, starts_W: np.ndarray, start: int, count: int) -> str:
    """Returns the words [start, start + count) as written in the text."""
    lowered = text.lower()
    # Some characters become two in lower case.
    shown = text if len(text) == len(lowered) else lowered
    end = int(starts_W[start + count]) if start + count < len(starts_W) else len(shown)
    return shown[int(starts_W[start]) : end].strip()
