"""Statistics of rows: how well documents fill them, and which tokens of the loss have lost their context.

Shape letters: D documents, T targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lm_trainer.data.formats.too_long import TooLong
from lm_trainer.data.rows.packing import pack_best_fit


class PackingStats(NamedTuple):
    """Utilisation of rows of one length by documents."""

    rows: int
    used: float
    """Fraction of positions with a target in the loss."""
    cut: float
    """Fraction of documents that are split over several rows or shortened."""
    left_out: float = 0.0
    """Fraction of the targets in the loss that are in no row, because their document is longer than a row."""
    without_start: float | None = None
    """Fraction of the targets in the loss whose row does not hold the beginning of their document, such as answers that
    are separated from their prompt; None if no loss mask is known."""


class _TargetCounts(NamedTuple):
    """Numbers of targets in the loss."""

    total: int
    in_chunks: int
    """Targets in full rows of `concat`."""
    in_plan: int
    """Targets in rows of `best_fit`."""
    in_chunks_without_start: int | None = None
    in_plan_without_start: int | None = None


def packing_stats(
    lengths_D: np.ndarray, seq_len: int, targets: Iterable[np.ndarray] | None = None, too_long: TooLong = "split"
) -> dict[str, PackingStats]:
    """Computes statistics of rows under `data.packing: concat` and `best_fit`, keyed by these names.

    Args:
        lengths_D: int64, number of tokens of each document of a stream, including its end-of-document token.
        seq_len: number of inputs of a row.
        targets: arrays int64 [T] with the positions in the stream of the loss targets; None counts every token but the
            first of each document.
        too_long: treatment of documents longer than a row with `best_fit`.
    """
    ends_D = np.cumsum(lengths_D)
    starts_D, tokens = ends_D - lengths_D, int(ends_D[-1])
    chunks = tokens // seq_len
    num_positions = chunks * seq_len
    # The last token of a document is only the target of the position before it, so it may fall into the next row.
    crossing = int((starts_D // seq_len != np.maximum(ends_D - 2, starts_D) // seq_len).sum())
    plan = pack_best_fit(lengths_D, seq_len, too_long=too_long)
    is_long_D = lengths_D - 1 > seq_len
    if targets is None:
        left_out = int((lengths_D - 1 - seq_len)[is_long_D].sum()) if too_long in ("left", "right") else 0
        left_out = int((lengths_D - 1)[is_long_D].sum()) if too_long == "skip" else left_out
        limit = min(num_positions + 1, tokens)
        total = tokens - len(lengths_D)
        counts = _TargetCounts(total, limit - int((starts_D < limit).sum()), total - left_out)
    else:
        counts = _count_targets(lengths_D, seq_len, targets, too_long)
    cut = 0.0 if too_long == "skip" else int(is_long_D.sum()) / len(lengths_D)
    return {
        "concat": PackingStats(
            chunks,
            counts.in_chunks / num_positions if num_positions else 0.0,
            crossing / len(lengths_D),
            without_start=_share(counts.in_chunks_without_start, counts.total),
        ),
        "best_fit": PackingStats(
            plan.num_rows,
            counts.in_plan / max(plan.num_rows * seq_len, 1),
            cut,
            (counts.total - counts.in_plan) / max(counts.total, 1),
            _share(counts.in_plan_without_start, counts.in_plan),
        ),
    }


def _share(count: int | None, total: int) -> float | None:
    return None if count is None else count / max(total, 1)


def _count_targets(
    lengths_D: np.ndarray, seq_len: int, targets: Iterable[np.ndarray], too_long: TooLong
) -> _TargetCounts:
    starts_D = np.cumsum(lengths_D) - lengths_D
    num_positions = int(lengths_D.sum()) // seq_len * seq_len
    sums = np.zeros(5, np.int64)
    for targets_T in targets:
        documents_T = np.searchsorted(starts_D, targets_T, side="right") - 1
        starts_T = starts_D[documents_T]
        # A target is predicted at the position before it. Positions are counted from the beginning of the document.
        inputs_T = targets_T - 1 - starts_T
        excess_T = np.maximum(lengths_D[documents_T] - 1 - seq_len, 0)
        kept_T, without_start_T = np.ones(len(targets_T), bool), inputs_T >= seq_len
        if too_long == "skip":
            kept_T, without_start_T = excess_T == 0, np.zeros(len(targets_T), bool)
        elif too_long == "left":
            kept_T, without_start_T = inputs_T >= excess_T, excess_T > 0
        elif too_long == "right":
            kept_T, without_start_T = inputs_T < seq_len, np.zeros(len(targets_T), bool)
        in_chunks_T = targets_T <= num_positions
        chunk_without_start_T = starts_T // seq_len < (targets_T - 1) // seq_len
        sums += [
            len(targets_T),
            np.count_nonzero(in_chunks_T),
            np.count_nonzero(kept_T),
            np.count_nonzero(in_chunks_T & chunk_without_start_T),
            np.count_nonzero(kept_T & without_start_T),
        ]
    return _TargetCounts(*(int(value) for value in sums))
