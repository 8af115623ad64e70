"""Held-out sets whose rows hold full documents, like the rows of packed training sets.

Shape letters: D documents, R rows of the set, B rows of this host, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.rows.chunks import PADDING_SEGMENT
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.packing import PackedRows, PackingPlan


@dataclass(frozen=True, kw_only=True)
class PackedSet(EvalSet):
    """All documents of a held-out set.

    Each document is in one row unless it is longer, and each token is predicted at most once.

    A document that begins in the training text is read from its beginning, but tokens before `first_token` are not
    predicted.
    """

    plan: PackingPlan
    splits_documents: bool = True
    """True if documents longer than a row go on in another one; False if they are cut or left out."""

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows

    @cached_property
    def _packed_rows(self) -> PackedRows:
        return PackedRows(self.stream, self.plan, self.seq_len, self.eos_id)

    @cached_property
    def _order_R(self) -> np.ndarray:
        """The rows of the plan, in the order of the document that opened each row.

        The plan starts with the longest documents of each group, but the first batches of a set should be
        representative.
        """
        return np.argsort(self.plan.starts_P[self.plan.firsts_R[:-1]], kind="stable")

    def stream_positions(self, rows_B: np.ndarray) -> np.ndarray:
        """See `EvalSet`."""
        places_BS = self._packed_rows.stream_positions(self._order_R[np.minimum(rows_B, self.num_rows - 1)])
        places_BS[rows_B >= self.num_rows] = len(self.stream)
        return places_BS

    def count_split_documents(self, ends_D: np.ndarray) -> int:
        """See `EvalSet`."""
        if not self.splits_documents:
            return 0
        return int(np.count_nonzero(np.diff(ends_D, prepend=self.first_token) - 1 > self.seq_len))

    def with_stride(self, stride: int) -> EvalSet:
        """See `EvalSet`. The result is not packed, since overlapping rows do not need full documents."""
        common = {field.name: getattr(self, field.name) for field in fields(EvalSet)}
        return EvalSet(**common).with_stride(stride)

    def _read(self, rows_B: np.ndarray) -> Batch:
        """See `EvalSet`."""
        # Rows past the end repeat the last row and become padding.
        batch = self._packed_rows.read(self._order_R[np.minimum(rows_B, self.num_rows - 1)])
        if self.first_token:
            batch.weights[self.stream_positions(rows_B) + 1 < self.first_token] = 0
        past_B = rows_B >= self.num_rows
        batch.tokens[past_B] = batch.targets[past_B] = self.eos_id
        batch.weights[past_B] = 0
        batch.positions[past_B] = np.arange(self.seq_len)
        batch.segments[past_B] = PADDING_SEGMENT
        return batch
