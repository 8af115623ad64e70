"""Duplicates among the documents of the training text: exact ones by their tokens, near ones by MinHash.

Near duplicates share words: a document is the set of its runs of five words, and the similarity of two is the share of
runs that both have of those that either has (Jaccard). MinHash estimates it from a signature of each document (Broder,
"On the resemblance and containment of documents", 1997); documents whose signatures agree in one band of several values
are compared (Leskovec et al., "Mining of massive datasets", chapter 3).

Shape letters: D documents, P values of a signature, K pairs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lm_trainer.core.errors import UserError
from lm_trainer.data.corpus import Documents, beside, documents_of, train_caches
from lm_trainer.data.dataset import Data
from lm_trainer.data.formats.ids import IdsFormat
from lm_trainer.data.ngrams import ngrams_of, words_of

PERMUTATIONS = 128
"""Values of a signature: the similarity is estimated within 0.04 or so."""
_SEED = 1
_CERTAINTY = 0.99
"""The chance with which two documents of just the least similarity are compared."""
_ROUNDS = 8
"""Documents of a bucket that others of it are compared with."""


@dataclass(frozen=True)
class Duplicate:
    """A document that stands in the data before, alike or nearly."""

    set: str
    document: int
    tokens: int
    like_set: str
    like: int
    """The first document of the group, which is kept."""
    similarity: float
    """With that one; 1 where the tokens are the same."""
    exact: bool

    def entry(self) -> dict[str, Any]:
        """As a line of a list of documents to leave out."""
        like = {"set": self.like_set, "document": self.like}
        why = {"why": "exact"} if self.exact else {"why": "near", "similarity": round(self.similarity, 3)}
        return {"set": self.set, "document": self.document, "tokens": self.tokens, **why, "like": like}


@dataclass(frozen=True)
class DedupReport:
    """The duplicates of the training text."""

    documents: int
    """All that were compared."""
    tokens: int
    """Tokens of them, those that end documents included."""
    duplicates: list[Duplicate]
    """In the order of the data."""

    def total(self, *, exact: bool) -> tuple[int, int]:
        """Counts the duplicates of a kind, and their tokens."""
        found = [each.tokens for each in self.duplicates if each.exact == exact]
        return len(found), sum(found)

    @property
    def groups(self) -> dict[tuple[str, int], list[Duplicate]]:
        """The duplicates by the document that is kept, the largest group first."""
        found: dict[tuple[str, int], list[Duplicate]] = {}
        for each in self.duplicates:
            found.setdefault((each.like_set, each.like), []).append(each)
        return dict(sorted(found.items(), key=lambda group: -len(group[1])))


def find_duplicates(
    data: Data,
    *,
    threshold: float | None,
    ngram: int = 5,
    texts_V: Sequence[bytes | None] = (),
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> DedupReport:
    """Compares all documents of the training text, of all sets; of each group the first one is kept.

    Args:
        data: complete.
        threshold: the least similarity of near duplicates; None: exact ones alone.
        ngram: words of the runs that are compared.
        texts_V: of `token_texts`; needed for near duplicates.
        progress: told the set, its documents that have been read, and all of them.

    Raises:
        UserError: where near duplicates are asked for of tokens that are no text, or rensa is not installed.
    """
    if threshold is not None:
        _check_near(data)

    def work(batch: Documents) -> tuple[np.ndarray, np.ndarray]:
        hashes = [hashlib.blake2b(tokens.tobytes(), digest_size=16).digest() for tokens in batch.tokens_D]
        digests = np.frombuffer(b"".join(hashes), "V16")
        empty = np.zeros((len(hashes), 0), np.uint32)
        return digests, empty if threshold is None else signatures(batch.texts(texts_V), ngram)

    owners, numbers, lengths, exact, near = [], [], [], [], []
    for index, (name, cache) in enumerate(train_caches(data).items()):
        for batch, (digests, signed) in beside(documents_of(name, cache), work):
            owners.append(np.full(len(digests), index, np.int32))
            numbers.append(batch.numbers_D)
            lengths += [len(tokens) for tokens in batch.tokens_D]
            exact.append(digests)
            near.append(signed)
            progress(name, int(batch.numbers_D[-1]) + 1 if len(batch.numbers_D) else 0, cache.ledger.num_documents)
    _, same_D = np.unique(np.concatenate(exact), return_inverse=True)
    firsts_D = _firsts(same_D)
    kept_D, similar_D = firsts_D, np.ones(len(firsts_D))
    if threshold is not None:
        kept_D, similar_D = _join(firsts_D, np.concatenate(near), threshold)
    names, owner_D, number_D = list(data.config.trained), np.concatenate(owners), np.concatenate(numbers)
    found = [
        Duplicate(
            names[owner_D[at]],
            int(number_D[at]),
            lengths[at],
            names[owner_D[kept_D[at]]],
            int(number_D[kept_D[at]]),
            float(similar_D[at]),
            # In a group of near duplicates too: its tokens stand in the data before.
            bool(firsts_D[at] != at),
        )
        for at in np.flatnonzero(kept_D != np.arange(len(kept_D))).tolist()
    ]
    return DedupReport(len(lengths), sum(lengths), found)


def _check_near(data: Data) -> None:
    for name in data.config.trained:
        if isinstance(data.config.sets[name].format, IdsFormat):
            raise UserError(f"{name} holds token ids, of whose text nothing is known: add --exact")
    if importlib.util.find_spec("rensa") is None:
        raise UserError("near duplicates need the package rensa: run: pip install rensa, or add --exact")


def signatures(texts_D: Sequence[str], ngram: int) -> np.ndarray:
    """Returns the MinHash signatures of texts: uint32 [D, P]; 0 where there is no word.

    A text of fewer words than `ngram` counts as one run.
    """
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    signed_DP = np.zeros((len(texts_D), PERMUTATIONS), np.uint32)
    words = words_of(texts_D)
    counts_D = np.bincount(words.documents_W, minlength=len(texts_D))
    hashes_G, firsts_G = ngrams_of(words, ngram)
    owners_G = words.documents_W[firsts_G]
    for length in range(1, ngram):
        if (short := (counts_D == length)).any():
            some_G, at_G = ngrams_of(words, length)
            whole = short[words.documents_W[at_G]]
            hashes_G = np.concatenate([hashes_G, some_G[whole]])
            owners_G = np.concatenate([owners_G, words.documents_W[at_G[whole]]])
    order = np.argsort(owners_G, kind="stable")
    there_D = np.flatnonzero(counts_D)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners_G, minlength=len(texts_D))[there_D])])
    if len(there_D):
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.ascontiguousarray(hashes_G[order]), offsets.astype(np.uint64), PERMUTATIONS, _SEED
        )
        signed_DP[there_D] = np.asarray(matrix.to_rows(), np.uint32)
    return signed_DP


def rows_per_band(threshold: float) -> int:
    """Values of a band: as many as still compare two documents of the least similarity with near certainty."""
    fitting = [rows for rows in range(1, 33) if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _CERTAINTY]
    return max(fitting, default=1)


def similar_pairs(signed_DP: np.ndarray, threshold: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields pairs of documents whose signatures agree in so large a share: int64 [K] each, the first one earlier.

    A document is compared with the first ones of each of its buckets, not with all.
    """
    rows = rows_per_band(threshold)
    there_D = np.flatnonzero(signed_DP.any(axis=1))
    for band in range(PERMUTATIONS // rows):
        keys = np.ascontiguousarray(signed_DP[there_D, band * rows : (band + 1) * rows])
        _, buckets_D = np.unique(keys.view(f"V{4 * rows}").reshape(-1), return_inverse=True)
        left_D, buckets_D = there_D, buckets_D.reshape(-1)
        for _ in range(_ROUNDS):
            shared = np.bincount(buckets_D)[buckets_D] > 1
            left_D, buckets_D = left_D[shared], buckets_D[shared]
            if not len(left_D):
                break
            heads_D = left_D[_firsts(buckets_D)]
            alike = (signed_DP[left_D] == signed_DP[heads_D]).mean(axis=1) >= threshold
            others = heads_D != left_D
            yield heads_D[alike & others], left_D[alike & others]
            rest = others & ~alike
            left_D, buckets_D = left_D[rest], buckets_D[rest]


def _join(firsts_D: np.ndarray, signed_DP: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first document of the group of each, and the similarity of the two."""
    count = len(firsts_D)
    pairs = [(firsts_D, np.arange(count)), *similar_pairs(signed_DP, threshold)]
    ones, others = (np.concatenate(side) for side in zip(*pairs, strict=True))
    links = coo_array((np.ones(len(ones), bool), (ones, others)), shape=(count, count))
    _, groups_D = connected_components(links, directed=False)
    kept_D = _firsts(groups_D)
    similar_D = np.ones(count)
    for start in range(0, count, 1 << 16):
        here = slice(start, start + (1 << 16))
        similar_D[here] = (signed_DP[here] == signed_DP[kept_D[here]]).mean(axis=1)
    return kept_D, similar_D


def _firsts(groups_D: np.ndarray) -> np.ndarray:
    """The first member of the group of each: int64 [D]."""
    _, firsts, inverse_D = np.unique(groups_D, return_index=True, return_inverse=True)
    return firsts[inverse_D.reshape(-1)]
