"""Comparison of two models on the same documents.

Shape letters: D documents that both models were asked for.
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
"""Tokens from the beginning of a document that are shown."""


@dataclass(frozen=True)
class DocumentDifference:
    """A document on which two models differ."""

    where: str
    """File and line or row."""
    difference: float
    """Difference of the document's means, in the unit of the comparison: the first model less the second."""
    first: float
    second: float
    excerpt: str


@dataclass(frozen=True)
class SetComparison:
    """The difference of two models on a set."""

    name: str
    unit: Literal["bits per byte", "nats per token"]
    num_documents: int
    first: float
    second: float
    difference: Mean
    """The first model less the second: below 0 where the first predicts better."""
    interval: tuple[float, float]
    """95 % of the differences that other documents of the same kind would show."""
    worst: list[DocumentDifference]
    """The documents that contribute most to the difference, whichever its sign."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "difference": self.difference.value, "difference_error": self.difference.error}


def compare_sets(first: SetLosses, second: SetLosses, *, same_tokens: bool, documents: int = 5) -> SetComparison:
    """The paired difference on one set.

    Args:
        first: of one model.
        second: of the other, on the same text.
        same_tokens: true if both models have the same tokenizer; else bytes of text are the only common measure.
        documents: how many of those that differ most are named.

    Raises:
        UserError: where the models cannot be compared on this set.
    """
    a, b, common = _paired(first.documents, second.documents)
    by_bytes = a.bytes_D is not None and b.bytes_D is not None
    if not (by_bytes or same_tokens):
        raise UserError(
            f"{first.name}: the models have other tokenizers, and the text of the tokens is not known; nothing is "
            f"common to their losses"
        )
    x_D, y_D = _terms(a, by_bytes)
    u_D, v_D = _terms(b, by_bytes)
    difference = _difference(x_D, y_D, u_D, v_D)
    # The part of each document in the difference of the sets' means.
    shares_D = x_D / math.fsum(y_D) - u_D / math.fsum(v_D)
    largest = np.argsort(-np.abs(shares_D), kind="stable")[:documents]
    means = ((int(d), float(x_D[d] / y_D[d]), float(u_D[d] / v_D[d])) for d in largest if y_D[d] and v_D[d])
    worst = [_of_document(first, int(common[d]), a_mean, b_mean) for d, a_mean, b_mean in means]
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
    """The paired differences on all sets, which both models have been asked for in the same order."""
    return [compare_sets(a, b, same_tokens=same_tokens) for a, b in zip(first, second, strict=True)]


def _terms(documents: Documents, by_bytes: bool) -> tuple[np.ndarray, np.ndarray]:
    if by_bytes and documents.bytes_D is not None:
        return documents.nats_D / math.log(2), documents.bytes_D
    return documents.nats_D, documents.tokens_D


def _difference(x_D: np.ndarray, y_D: np.ndarray, u_D: np.ndarray, v_D: np.ndarray) -> Mean:
    """Sum x / sum y - sum u / sum v with its standard error by linearisation, the documents being the same in both."""
    y, v, count = math.fsum(y_D), math.fsum(v_D), len(x_D)
    r, s = math.fsum(x_D) / y, math.fsum(u_D) / v
    if count < 2:
        return Mean(r - s, math.nan)
    rest_D = (x_D - r * y_D) / y - (u_D - s * v_D) / v
    return Mean(r - s, math.sqrt(count / (count - 1) * math.fsum(rest_D**2)))


def _paired(a: Documents, b: Documents) -> tuple[Documents, Documents, np.ndarray]:
    common, in_a, in_b = np.intersect1d(a.numbers_D, b.numbers_D, return_indices=True)
    return _taken(a, in_a), _taken(b, in_b), common


def _taken(documents: Documents, which: np.ndarray) -> Documents:
    counts_D = documents.bytes_D
    return Documents(
        documents.numbers_D[which],
        documents.nats_D[which],
        documents.tokens_D[which],
        None if counts_D is None else counts_D[which],
    )


def _of_document(of: SetLosses, number: int, first: float, second: float) -> DocumentDifference:
    passage = of.held_out.passage(number, EXCERPT_TOKENS)
    excerpt = " ".join(passage.text.split())
    return DocumentDifference(passage.where, first - second, first, second, excerpt)
