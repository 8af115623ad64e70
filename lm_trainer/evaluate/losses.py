"""Losses of texts: per document, per set, and over groups of sets.

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
from lm_trainer.run.training.eval_groups import group_by_tag


class Mean(NamedTuple):
    """A mean with its standard error."""

    value: float
    error: float
    """Standard error; NaN with fewer than two documents."""


@dataclass(frozen=True)
class Documents:
    """Sums over the predicted tokens of each document. Documents without predicted tokens are omitted.

    The first token of a document is not a target if the tokenizer puts no token before it, as in training.
    """

    numbers_D: np.ndarray
    """int64: index of the document in its set, from 0."""
    nats_D: np.ndarray
    """float64: sum of -log p."""
    tokens_D: np.ndarray
    """float64: sum of the weights of the targets; every weight is 1."""
    bytes_D: np.ndarray | None
    """float64: number of UTF-8 bytes of the targets' text; None if unknown."""

    @property
    def tokens(self) -> int:
        return int(self.tokens_D.sum())

    @property
    def bytes(self) -> float | None:
        return None if self.bytes_D is None else math.fsum(self.bytes_D)

    @property
    def loss(self) -> Mean:
        """Mean loss in nats per token."""
        return ratio_of_sums(self.nats_D, self.tokens_D)

    @property
    def bits_per_byte(self) -> Mean | None:
        """Sum of the losses of all targets in bits, including end-of-document tokens, divided by the bytes of text."""
        return None if self.bytes_D is None else ratio_of_sums(self.nats_D / math.log(2), self.bytes_D)

    def concatenate(self, other_sets: Sequence[Documents]) -> Documents:
        """Concatenates the documents of several sets."""
        every = (self, *other_sets)
        byte_counts = [documents.bytes_D for documents in every if documents.bytes_D is not None]
        return Documents(
            np.concatenate([documents.numbers_D for documents in every]),
            np.concatenate([documents.nats_D for documents in every]),
            np.concatenate([documents.tokens_D for documents in every]),
            np.concatenate(byte_counts) if len(byte_counts) == len(every) else None,
        )


@dataclass(frozen=True)
class SetLosses:
    """A data set with the losses of its documents."""

    name: str
    tags: tuple[str, ...]
    held_out: HeldOut
    documents: Documents
    num_split: int
    """Number of documents that are split over several rows. Some of their tokens are predicted without full context."""


def ratio_of_sums(numerators_D: np.ndarray, denominators_D: np.ndarray) -> Mean:
    """Computes the ratio of two sums over documents, and its standard error by linearisation.

    The error is sqrt(D / (D - 1) sum_d (x_d - r y_d)^2) / sum_d y_d where r is the ratio (Cochran 1977, Sampling
    Techniques, equation 6.13, for a sample that is small compared with its population).

    Args:
        numerators_D: x of each document.
        denominators_D: y of each document.
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
    """Computes the loss of each document of a set. Documents are packed into rows as in training.

    Args:
        model: the model to evaluate.
        held_out: a data set with rows of `model.row` tokens.
        max_batches: maximum number of batches to read; None means the full set.
    """
    rows, ends_D = held_out.rows, held_out.ends_D
    size, local = model.losses.batch_size, model.losses.local_rows
    counts_V = rows.token_bytes
    sums = np.zeros((3, len(ends_D)))
    batches = rows.batches(size, rows=local, max_batches=max_batches)
    pending: list[Batch] = []

    def append_to_pending(batch: Batch) -> Batch:
        pending.append(batch)
        return batch

    for index, nll_BS in enumerate(model.token_losses(map(append_to_pending, batches))):
        batch = pending.pop(0)
        numbers_B = index * size + np.asarray(local)
        is_target_BS = batch.weights > 0
        # A target is the token after its input.
        positions_BS = rows.stream_positions(numbers_B) + 1
        documents_N = np.searchsorted(ends_D, positions_BS[is_target_BS], side="right")
        weights_N = batch.weights[is_target_BS].astype(np.float64)
        values = [nll_BS[is_target_BS] * weights_N, weights_N]
        if counts_V is not None:
            values.append(counts_V[batch.targets[is_target_BS]] * weights_N)
        for total_D, value_N in zip(sums, values, strict=False):
            total_D += np.bincount(documents_N, value_N, minlength=len(ends_D))
    nats_D, tokens_D, bytes_D = sums
    predicted = np.flatnonzero(tokens_D)
    documents = Documents(
        predicted, nats_D[predicted], tokens_D[predicted], None if counts_V is None else bytes_D[predicted]
    )
    return SetLosses(held_out.name, rows.tags, held_out, documents, rows.count_split_documents(ends_D))


class GroupAverages(NamedTuple):
    """Averages over several sets."""

    name: str
    """A tag, a common prefix of several tags, or "" for all sets."""
    members: tuple[str, ...]
    micro_loss: Mean
    """Mean over all tokens of the sets."""
    macro_loss: Mean
    """Mean of the sets' means, all with the same weight."""
    micro_bits_per_byte: Mean | None
    macro_bits_per_byte: Mean | None


def group_means(sets: Sequence[SetLosses]) -> list[GroupAverages]:
    """Computes the averages of every group that `group_by_tag` returns."""
    by_name = {losses.name: losses for losses in sets}
    groups = group_by_tag({losses.name: losses.tags for losses in sets})
    return [_average_group(name, [by_name[member] for member in members]) for name, members in groups.items()]


def _average_group(name: str, sets: Sequence[SetLosses]) -> GroupAverages:
    first, *other_documents = [losses.documents for losses in sets]
    joined = first.concatenate(other_documents)
    bits = [losses.documents.bits_per_byte for losses in sets]
    known_bits = [losses for losses in bits if losses is not None]
    return GroupAverages(
        name,
        tuple(losses.name for losses in sets),
        joined.loss,
        _average_means([losses.documents.loss for losses in sets]),
        joined.bits_per_byte,
        _average_means(known_bits) if len(known_bits) == len(bits) else None,
    )


def _average_means(values: Sequence[Mean]) -> Mean:
    error = math.sqrt(math.fsum(x.error**2 for x in values)) / len(values)
    return Mean(math.fsum(x.value for x in values) / len(values), error)
