"""Packs pairs of documents into rows, each pair whole and its documents next to each other.

In a row, the documents of pair p are the segments 2 p and 2 p + 1. An empty document takes no position, but its number.

Shape letters: D documents, P pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lm_trainer.data.formats.answers import AnswerFormat
from lm_trainer.data.rows.long_examples import LongExamples
from lm_trainer.data.rows.packing import PackingPlan, pack_best_fit
from lm_trainer.data.tokenize.open_cache import OpenCache


class PairPlan(NamedTuple):
    """A packing plan for pairs."""

    plan: PackingPlan
    pairs: int
    """Number of pairs, including the ones that are left out."""
    too_long: int
    """Number of pairs that are longer than a row, and left out."""
    longest: int
    """Number of positions of the longest pair."""

    def long_examples(self, format: AnswerFormat) -> LongExamples:
        """Returns the numbers of pairs with the treatment of the format."""
        return LongExamples(self.pairs, self.too_long, self.longest, format.on_too_long, format.content)


def pack_pairs(lengths_D: np.ndarray, seq_len: int) -> PairPlan:
    """Packs pairs by best fit, like `pack_best_fit` packs documents, and leaves out pairs longer than a row.

    Args:
        lengths_D: int64, number of tokens of each document, including its end-of-document token. Documents 2 p and
            2 p + 1 are pair p.
        seq_len: number of positions of a row.
    """
    starts_P2 = (np.cumsum(lengths_D) - lengths_D).reshape(-1, 2)
    # The last token of a document is only a target.
    inputs_P2 = (lengths_D - 1).reshape(-1, 2)
    sizes_P = inputs_P2.sum(1)
    fitting = np.flatnonzero(sizes_P <= seq_len)
    too_long, longest = len(sizes_P) - len(fitting), int(sizes_P.max(initial=0))
    if not len(fitting):
        nothing = PackingPlan(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(1, np.int64))
        return PairPlan(nothing, len(sizes_P), too_long, longest)
    lengths = sizes_P[fitting] + 1
    plan = pack_best_fit(lengths, seq_len)
    # The plan counts the kept pairs as if each were one document of a stream.
    pairs = fitting[np.searchsorted(np.cumsum(lengths) - lengths, plan.starts_P)]
    starts_P2, inputs_P2 = starts_P2[pairs], inputs_P2[pairs]
    # An empty document is read at the beginning of the other one, because the stream may end at its own.
    starts_P2 = np.where(inputs_P2 > 0, starts_P2, starts_P2[:, ::-1])
    expanded = PackingPlan(starts_P2.reshape(-1), inputs_P2.reshape(-1).astype(np.int32), 2 * plan.firsts_R)
    return PairPlan(expanded, len(sizes_P), too_long, longest)


def open_pair_plan(title: str, cache: OpenCache, format: AnswerFormat, seq_len: int) -> PairPlan:
    """Packs the pairs of a finished cache.

    Args:
        title: name of the set, for messages.
        cache: the cache with the documents.
        format: format of the set.
        seq_len: number of positions of a row.

    Raises:
        UserError: if all pairs are longer than a row, or any is and the format does not skip such pairs.
    """
    packed = pack_pairs(cache.document_lengths(), seq_len)
    packed.long_examples(format).check(title, seq_len)
    return packed
