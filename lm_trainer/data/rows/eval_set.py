"""Held-out sets, read in order.

Shape letters: B rows of this host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.rows.chunks import read_windows


@dataclass(frozen=True)
class EvalSet:
    """All of a held-out set in order, each token once."""

    name: str
    stream: TokenStream
    seq_len: int
    eos_id: int
    num_documents: int
    """Documents that end in the set."""
    text_bytes: int
    """UTF-8 bytes of the text, for bits per byte."""
    first_window: int = 0
    """Where the set begins in the stream; what comes before is trained on."""

    @property
    def num_tokens(self) -> int:
        return max(len(self.stream) - self.first_window * self.seq_len, 0)

    @property
    def num_windows(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def num_batches(self, batch_size: int) -> int:
        return -(-self.num_windows // batch_size)

    def batches(self, batch_size: int, *, rows: range, max_batches: int | None = None) -> Iterator[Batch]:
        """This host's rows of each global batch; where the set ends, rows are padding: weight 0 and segment -1."""
        check_rows(batch_size, rows)
        count = self.num_batches(batch_size)
        for index in range(count if max_batches is None else min(count, max_batches)):
            windows_B = index * batch_size + np.arange(rows.start, rows.stop, dtype=np.int64)
            yield read_windows(self.stream, self.first_window + windows_B, self.seq_len, self.eos_id)


def check_rows(batch_size: int, rows: range) -> None:
    """Refuses rows that no batch of that size has."""
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch_size:
        raise UserError(f"rows {rows} are no part of a batch of {batch_size}")
