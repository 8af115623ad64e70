"""Held-out sets, read in order.

Shape letters: B rows of this host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.rows.chunks import read_chunks


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
    first_chunk: int = 0
    """The chunk of the stream with which the set begins; those before are trained on."""

    @property
    def num_tokens(self) -> int:
        return max(len(self.stream) - self.first_chunk * self.seq_len, 0)

    @property
    def num_chunks(self) -> int:
        """Rows of the set; the last one may be short."""
        return -(-self.num_tokens // self.seq_len)

    def num_batches(self, batch_size: int) -> int:
        """Batches of the whole set; the last one may hold rows of padding."""
        return -(-self.num_chunks // batch_size)

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> Iterator[Batch]:
        """Yields this host's rows of each global batch; past the end of the set, rows are padding.

        Padding has weight 0 and segment -1.

        Args:
            batch_size: rows of the global batch.
            rows: this host's rows of it.
            max_batches: where to stop; None = at the end of the set.

        Raises:
            UserError: if a batch does not have such rows.
        """
        check_rows(batch_size, rows)
        count = self.num_batches(batch_size)
        for index in range(count if max_batches is None else min(count, max_batches)):
            chunks_B = index * batch_size + np.asarray(rows, np.int64)
            # Every host yields as many batches, even one whose rows lie past the end: all must run the same steps.
            yield read_chunks(self.stream, self.first_chunk + chunks_B, self.seq_len, self.eos_id)


def check_rows(batch_size: int, rows: Sequence[int]) -> None:
    """Refuses rows that no batch of that size has.

    Raises:
        UserError: if `rows` is empty, not in order, or reaches beyond the batch.
    """
    ordered = len(rows) > 0 and bool(np.all(np.diff(rows) > 0))
    if not ordered or rows[0] < 0 or rows[-1] >= batch_size:
        raise UserError(f"rows {rows} are no part of a batch of {batch_size}")
