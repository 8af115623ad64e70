"""Finds duplicate documents in the training text: exact duplicates by their tokens, and near duplicates by MinHash.

A document is represented by the set of its five-word shingles. The similarity of two documents is the Jaccard index of
their sets, which MinHash estimates from a signature of each document (Broder, "On the resemblance and containment of
documents", 1997). Documents whose signatures agree in a band of several values are compared (Leskovec et al., "Mining
of massive datasets", chapter 3).

Shape letters: D documents, P values of a signature, K pairs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lm_trainer.core.errors import UserError
from lm_trainer.data.corpus import Documents, iter_documents, map_in_order, train_caches
from lm_trainer.data.dataset import Data
from lm_trainer.data.formats.ids import IdsFormat
from lm_trainer.data.ngrams import hash_ngrams, hash_words

PERMUTATIONS = 128
"""Number of values of a signature. They estimate the similarity with an error of about 0.04."""
_SEED = 1
_CERTAINTY = 0.99
"""Probability that two documents with exactly the threshold similarity are compared."""
_ROUNDS = 8
"""Number of documents per bucket with which the other documents of the bucket are compared."""


@dataclass(frozen=True)
class Duplicate:
    """A document that has an exact or near copy earlier in the data."""

    set: str
    document: int
    tokens: int
    like_set: str
    like: int
    """Number of the group's first document, which is retained."""
    similarity: float
    """Similarity to document `like`; 1 if the tokens are identical."""
    exact: bool

    def exclusion_entry(self) -> dict[str, object]:
        """Returns the entry of the document for an exclusion list."""
        like = {"set": self.like_set, "document": self.like}
        reason = {"why": "exact"} if self.exact else {"why": "near", "similarity": round(self.similarity, 3)}
        return {"set": self.set, "document": self.document, "tokens": self.tokens, **reason, "like": like}


@dataclass(frozen=True)
class DedupReport:
    """The duplicates of the training text."""

    documents: int
    """Number of documents that were compared."""
    tokens: int
    """Number of tokens of all documents, including end-of-document tokens."""
    duplicates: list[Duplicate]
    """The duplicates in the order of the data."""

    def count_duplicates(self, *, exact: bool) -> tuple[int, int]:
        """Returns the number of exact or near duplicates, and the number of their tokens."""
        tokens = [duplicate.tokens for duplicate in self.duplicates if duplicate.exact == exact]
        return len(tokens), sum(tokens)

    @property
    def groups(self) -> dict[tuple[str, int], list[Duplicate]]:
        """Returns the duplicates of each retained document, with the largest group first."""
        groups: dict[tuple[str, int], list[Duplicate]] = {}
        for duplicate in self.duplicates:
            groups.setdefault((duplicate.like_set, duplicate.like), []).append(duplicate)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def find_duplicates(
    data: Data,
    *,
    threshold: float | None,
    ngram: int = 5,
    texts_V: Sequence[bytes | None] = (),
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> DedupReport:
    """Compares all documents of the training text across all sets. The first document of each group is retained.

    Args:
        data: complete data of the run.
        threshold: minimum similarity of near duplicates; None finds only exact duplicates.
        ngram: number of words per shingle.
        texts_V: text of each token, from `token_texts`. Needed for near duplicates.
        progress: called with the name of a set, the number of its documents read so far, and their total number.

    Raises:
        UserError: if near duplicates are requested and a set has token ids without text, or rensa is not installed.
    """
    if threshold is not None:
        _check_near(data)

    def hash_batch(batch: Documents) -> tuple[np.ndarray, np.ndarray]:
        hashes = [hashlib.blake2b(tokens.tobytes(), digest_size=16).digest() for tokens in batch.tokens_D]
        digests = np.frombuffer(b"".join(hashes), "V16")
        empty = np.zeros((len(hashes), 0), np.uint32)
        return digests, empty if threshold is None else minhash_signatures(batch.decode_texts(texts_V), ngram)

    owners, numbers, lengths, exact, near = [], [], [], [], []
    for set_index, (name, cache) in enumerate(train_caches(data).items()):
        for batch, (digests, signed) in map_in_order(iter_documents(name, cache), hash_batch):
            owners.append(np.full(len(digests), set_index, np.int32))
            numbers.append(batch.numbers_D)
            lengths += [len(tokens) for tokens in batch.tokens_D]
            exact.append(digests)
            near.append(signed)
            progress(name, int(batch.numbers_D[-1]) + 1 if len(batch.numbers_D) else 0, cache.ledger.num_documents)
    _, same_D = np.unique(np.concatenate(exact), return_inverse=True)
    firsts_D = _first_group_members(same_D)
    first_D, similar_D = firsts_D, np.ones(len(firsts_D))
    if threshold is not None:
        first_D, similar_D = _group_duplicates(firsts_D, np.concatenate(near), threshold)
    names, owner_D, number_D = list(data.config.trained), np.concatenate(owners), np.concatenate(numbers)
    duplicates = [
        Duplicate(
            names[owner_D[index]],
            int(number_D[index]),
            lengths[index],
            names[owner_D[first_D[index]]],
            int(number_D[first_D[index]]),
            float(similar_D[index]),
            # This also holds within a group of near duplicates: the same tokens occur earlier in the data.
            bool(firsts_D[index] != index),
        )
        for index in np.flatnonzero(first_D != np.arange(len(first_D))).tolist()
    ]
    return DedupReport(len(lengths), sum(lengths), duplicates)


def _check_near(data: Data) -> None:
    for name in data.config.trained:
        if isinstance(data.config.sets[name].format, IdsFormat):
            raise UserError(f"{name} holds token ids, of whose text nothing is known: add --exact")
    if importlib.util.find_spec("rensa") is None:
        raise UserError("near duplicates need the package rensa: run: pip install rensa, or add --exact")


def minhash_signatures(texts_D: Sequence[str], ngram: int) -> np.ndarray:
    """Returns the MinHash signatures of texts: uint32 [D, P]; 0 for a text without words.

    A text with fewer words than `ngram` counts as one shingle.
    """
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    signed_DP = np.zeros((len(texts_D), PERMUTATIONS), np.uint32)
    words = hash_words(texts_D)
    counts_D = np.bincount(words.documents_W, minlength=len(texts_D))
    hashes_G, firsts_G = hash_ngrams(words, ngram)
    owners_G = words.documents_W[firsts_G]
    for length in range(1, ngram):
        if (short := (counts_D == length)).any():
            extra_G, extra_firsts_G = hash_ngrams(words, length)
            is_short_G = short[words.documents_W[extra_firsts_G]]
            hashes_G = np.concatenate([hashes_G, extra_G[is_short_G]])
            owners_G = np.concatenate([owners_G, words.documents_W[extra_firsts_G[is_short_G]]])
    order = np.argsort(owners_G, kind="stable")
    nonempty_D = np.flatnonzero(counts_D)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners_G, minlength=len(texts_D))[nonempty_D])])
    if len(nonempty_D):
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.ascontiguousarray(hashes_G[order]), offsets.astype(np.uint64), PERMUTATIONS, _SEED
        )
        signed_DP[nonempty_D] = np.asarray(matrix.to_rows(), np.uint32)
    return signed_DP


def rows_per_band(threshold: float) -> int:
    """Returns the largest number of values per band that gives `_CERTAINTY` at the threshold similarity."""
    fitting = [rows for rows in range(1, 33) if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _CERTAINTY]
    return max(fitting, default=1)


def similar_pairs(signed_DP: np.ndarray, threshold: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields pairs of documents whose signatures agree in at least the fraction `threshold` of their values.

    Yields two int64 [K], with the earlier document of each pair first.

    A document is compared only with the first documents of each of its buckets.
    """
    rows = rows_per_band(threshold)
    nonempty_D = np.flatnonzero(signed_DP.any(axis=1))
    for band in range(PERMUTATIONS // rows):
        keys = np.ascontiguousarray(signed_DP[nonempty_D, band * rows : (band + 1) * rows])
        _, buckets_D = np.unique(keys.view(f"V{4 * rows}").reshape(-1), return_inverse=True)
        left_D, buckets_D = nonempty_D, buckets_D.reshape(-1)
        for _ in range(_ROUNDS):
            shared = np.bincount(buckets_D)[buckets_D] > 1
            left_D, buckets_D = left_D[shared], buckets_D[shared]
            if not len(left_D):
                break
            heads_D = left_D[_first_group_members(buckets_D)]
            alike = (signed_DP[left_D] == signed_DP[heads_D]).mean(axis=1) >= threshold
            is_other = heads_D != left_D
            yield heads_D[alike & is_other], left_D[alike & is_other]
            remaining = is_other & ~alike
            left_D, buckets_D = left_D[remaining], buckets_D[remaining]


def _group_duplicates(firsts_D: np.ndarray, signed_DP: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first document of each document's group, and the similarity of the two."""
    count = len(firsts_D)
    pairs = [(firsts_D, np.arange(count)), *similar_pairs(signed_DP, threshold)]
    left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
    links = coo_array((np.ones(len(left), bool), (left, right)), shape=(count, count))
    _, groups_D = connected_components(links, directed=False)
    first_D = _first_group_members(groups_D)
    similar_D = np.ones(count)
    for start in range(0, count, 1 << 16):
        block = slice(start, start + (1 << 16))
        similar_D[block] = (signed_DP[block] == signed_DP[first_D[block]]).mean(axis=1)
    return first_D, similar_D


def _first_group_members(groups_D: np.ndarray) -> np.ndarray:
    """Returns the first member of each element's group: int64 [D]."""
    _, firsts, inverse_D = np.unique(groups_D, return_index=True, return_inverse=True)
    return firsts[inverse_D.reshape(-1)]
