"""Comparison of two models on the same documents.

Shape letters: D documents evaluated by both models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.evaluate.losses import Documents, Mean, SetLosses

EXCERPT_TOKENS = 40
"""Number of tokens shown from the beginning of a document."""


@dataclass(frozen=True)
class DocumentDifference:
    """A document on which two models differ."""

    where: str
    """Location: file and line or row."""
    difference: float
    """Mean loss of the first model minus the mean loss of the second, in the unit of the comparison."""
    first: float
    second: float
    excerpt: str


@dataclass(frozen=True)
class SetComparison:
    """The difference in loss between two models on a set."""

    name: str
    unit: Literal["bits per byte", "nats per token"]
    num_documents: int
    first: float
    second: float
    difference: Mean
    """Loss of the first model minus the loss of the second: negative if the first model predicts better."""
    interval: tuple[float, float]
    """95 % confidence interval, which assumes that all documents are drawn from the same distribution."""
    worst: list[DocumentDifference]
    """The documents whose contributions to the difference are largest in absolute value."""

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as plain data for JSON."""
        return {**asdict(self), "difference": self.difference.value, "difference_error": self.difference.error}


def compare_sets(first: SetLosses, second: SetLosses, *, same_tokens: bool, documents: int = 5) -> SetComparison:
    """Computes the paired difference between two models on one set.

    Args:
        first: losses of one model.
        second: losses of the other model on the same text.
        same_tokens: True if both models have the same tokenizer. Otherwise the losses are compared per byte of text.
        documents: number of documents to report, those with the largest differences first.

    Raises:
        UserError: if the models cannot be compared on this set.
    """
    a, b, common = _pair_documents(first.documents, second.documents)
    by_bytes = a.bytes_D is not None and b.bytes_D is not None
    if not (by_bytes or same_tokens):
        raise UserError(
            f"{first.name}: the models have other tokenizers, and the text of the tokens is not known; nothing is "
            f"common to their losses"
        )
    x_D, y_D = _numerators_and_denominators(a, by_bytes)
    u_D, v_D = _numerators_and_denominators(b, by_bytes)
    difference = _ratio_difference(x_D, y_D, u_D, v_D)
    # Contribution of each document to the difference of the means.
    shares_D = x_D / math.fsum(y_D) - u_D / math.fsum(v_D)
    largest = np.argsort(-np.abs(shares_D), kind="stable")[:documents]
    means = ((int(d), float(x_D[d] / y_D[d]), float(u_D[d] / v_D[d])) for d in largest if y_D[d] and v_D[d])
    worst = [_document_difference(first, int(common[d]), a_mean, b_mean) for d, a_mean, b_mean in means]
    half = 1.959964 * difference.error
    return SetComparison(
        first.name,
        "bits per byte" if by_bytes else "nats per token",
        len(common),
        math.fsum(x_D) / math.fsum(y_D),
        math.fsum(u_D) / math.fsum(v_D),
        difference,
        (difference.value - half, difference.value + half),
        worst,
    )


def compare(first: Sequence[SetLosses], second: Sequence[SetLosses], *, same_tokens: bool) -> list[SetComparison]:
    """Computes the paired differences on all sets; both models must have evaluated the sets in the same order."""
    return [compare_sets(a, b, same_tokens=same_tokens) for a, b in zip(first, second, strict=True)]


def _numerators_and_denominators(documents: Documents, by_bytes: bool) -> tuple[np.ndarray, np.ndarray]:
    if by_bytes and documents.bytes_D is not None:
        return documents.nats_D / math.log(2), documents.bytes_D
    return documents.nats_D, documents.tokens_D


def _ratio_difference(x_D: np.ndarray, y_D: np.ndarray, u_D: np.ndarray, v_D: np.ndarray) -> Mean:
    """Computes sum x / sum y - sum u / sum v and its standard error by linearisation, over the same documents."""
    y, v, count = math.fsum(y_D), math.fsum(v_D), len(x_D)
    r, s = math.fsum(x_D) / y, math.fsum(u_D) / v
    if count < 2:
        return Mean(r - s, math.nan)
    rest_D = (x_D - r * y_D) / y - (u_D - s * v_D) / v
    return Mean(r - s, math.sqrt(count / (count - 1) * math.fsum(rest_D**2)))


def _pair_documents(a: Documents, b: Documents) -> tuple[Documents, Documents, np.ndarray]:
    common, in_a, in_b = np.intersect1d(a.numbers_D, b.numbers_D, return_indices=True)
    return _select_documents(a, in_a), _select_documents(b, in_b), common


def _select_documents(documents: Documents, indices: np.ndarray) -> Documents:
    counts_D = documents.bytes_D
    return Documents(
        documents.numbers_D[indices],
        documents.nats_D[indices],
        documents.tokens_D[indices],
        None if counts_D is None else counts_D[indices],
    )


def _document_difference(losses: SetLosses, number: int, first: float, second: float) -> DocumentDifference:
    passage = losses.held_out.first_passage(number, EXCERPT_TOKENS)
    excerpt = " ".join(passage.text.split())
    return DocumentDifference(passage.where, first - second, first, second, excerpt)
