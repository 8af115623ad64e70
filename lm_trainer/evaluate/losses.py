"""Losses of texts: by document, by set, and over groups of sets.

Shape letters: D documents of a set, B rows of a batch, S positions, N targets of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.held_out import HeldOut
from lm_trainer.evaluate.model import EvalModel
from lm_trainer.run.training.eval_groups import groups_of


class Mean(NamedTuple):
    """A mean with its standard error."""

    value: float
    error: float
    """NaN where there are fewer than two documents."""


@dataclass(frozen=True)
class Documents:
    """Sums over the tokens of each document that were predicted; documents without such a token are not among them.

    The first token of a document is predicted from nothing where the tokenizer puts no token before it, and so is no
    target, here as in training.
    """

    numbers_D: np.ndarray
    """int64: the document's place among those of its set, from 0."""
    nats_D: np.ndarray
    """float64: sum of -log p."""
    tokens_D: np.ndarray
    """float64: sum of the weights of the targets, each 1."""
    bytes_D: np.ndarray | None
    """float64: UTF-8 bytes of the text that the targets stand for; None where they are not known."""

    @property
    def tokens(self) -> int:
        return int(self.tokens_D.sum())

    @property
    def bytes(self) -> float | None:
        return None if self.bytes_D is None else math.fsum(self.bytes_D)

    @property
    def loss(self) -> Mean:
        """Nats per token."""
        return ratio(self.nats_D, self.tokens_D)

    @property
    def bits_per_byte(self) -> Mean | None:
        """Bits of all targets, the ends of documents among them, over the bytes of their text."""
        return None if self.bytes_D is None else ratio(self.nats_D / math.log(2), self.bytes_D)

    def joined(self, others: Sequence[Documents]) -> Documents:
        """The documents of several sets as those of one."""
        every = (self, *others)
        known = [each.bytes_D for each in every if each.bytes_D is not None]
        return Documents(
            np.concatenate([each.numbers_D for each in every]),
            np.concatenate([each.nats_D for each in every]),
            np.concatenate([each.tokens_D for each in every]),
            np.concatenate(known) if len(known) == len(every) else None,
        )


@dataclass(frozen=True)
class SetLosses:
    """A set with the losses of its documents."""

    name: str
    tags: tuple[str, ...]
    held_out: HeldOut
    documents: Documents
    cut: int
    """Documents that do not stand in one row, so that some of their tokens are predicted from less than all before."""


def ratio(numerators_D: np.ndarray, denominators_D: np.ndarray) -> Mean:
    """The ratio of two sums over documents, and its standard error by linearisation.

    The error is sqrt(D / (D - 1) sum_d (x_d - r y_d)^2) / sum_d y_d with r the ratio (Cochran 1977, Sampling
    Techniques, equation 6.13, for a sample that is small beside its population).

    Args:
        numerators_D: x.
        denominators_D: y.
    """
    total, count = math.fsum(denominators_D), len(denominators_D)
    if not total:
        return Mean(math.nan, math.nan)
    value = math.fsum(numerators_D) / total
    if count < 2:
        return Mean(value, math.nan)
    squares = math.fsum((numerators_D - value * denominators_D) ** 2)
    return Mean(value, math.sqrt(count / (count - 1) * squares) / total)


def evaluate_set(model: EvalModel, held_out: HeldOut, *, max_batches: int | None = None) -> SetLosses:
    """Computes the losses of a set's documents, in rows as training reads them.

    Args:
        model: predicts.
        held_out: its rows have `model.row` tokens.
        max_batches: where to stop; None: at the end of the set.
    """
    rows, ends_D = held_out.rows, held_out.ends_D
    size, local = model.losses.batch_size, model.losses.local_rows
    counts_V = rows.token_bytes
    sums = np.zeros((3, len(ends_D)))
    batches = rows.batches(size, rows=local, max_batches=max_batches)
    seen: list[Batch] = []

    def remembered(batch: Batch) -> Batch:
        seen.append(batch)
        return batch

    for index, nll_BS in enumerate(model.token_losses(map(remembered, batches))):
        batch = seen.pop(0)
        numbers_B = index * size + np.asarray(local)
        where_BS = batch.weights > 0
        # A target is the token after its input.
        places_BS = rows.places_of(numbers_B) + 1
        documents_N = np.searchsorted(ends_D, places_BS[where_BS], side="right")
        weights_N = batch.weights[where_BS].astype(np.float64)
        values = [nll_BS[where_BS] * weights_N, weights_N]
        if counts_V is not None:
            values.append(counts_V[batch.targets[where_BS]] * weights_N)
        for total_D, value_N in zip(sums, values, strict=False):
            total_D += np.bincount(documents_N, value_N, minlength=len(ends_D))
    nats_D, tokens_D, bytes_D = sums
    there = np.flatnonzero(tokens_D)
    found = Documents(there, nats_D[there], tokens_D[there], None if counts_V is None else bytes_D[there])
    return SetLosses(held_out.name, rows.tags, held_out, found, rows.num_cut(ends_D))


class Group(NamedTuple):
    """Means over several sets."""

    name: str
    """A tag or the beginning of one, or "" for all sets."""
    members: tuple[str, ...]
    micro_loss: Mean
    """Mean of all tokens of the sets together."""
    macro_loss: Mean
    """The mean of the sets' means, each of the same weight."""
    micro_bits_per_byte: Mean | None
    macro_bits_per_byte: Mean | None


def group_means(sets: Sequence[SetLosses]) -> list[Group]:
    """The means of every group of `groups_of`."""
    by_name = {each.name: each for each in sets}
    groups = groups_of({each.name: each.tags for each in sets})
    return [_group(name, [by_name[member] for member in members]) for name, members in groups.items()]


def _group(name: str, sets: Sequence[SetLosses]) -> Group:
    first, *others = [each.documents for each in sets]
    together = first.joined(others)
    bits = [each.documents.bits_per_byte for each in sets]
    known = [each for each in bits if each is not None]
    return Group(
        name,
        tuple(each.name for each in sets),
        together.loss,
        _mean([each.documents.loss for each in sets]),
        together.bits_per_byte,
        _mean(known) if len(known) == len(bits) else None,
    )


def _mean(values: Sequence[Mean]) -> Mean:
    error = math.sqrt(math.fsum(x.error**2 for x in values)) / len(values)
    return Mean(math.fsum(x.value for x in values) / len(values), error)
