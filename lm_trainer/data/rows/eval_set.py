"""Held-out sets, whose rows are read in order.

Shape letters: B rows of this host, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.row_values import RowValues
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.rows.chunks import Chunks
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.data.tokenizer.token_bytes import count_token_bytes

_BLOCK_TOKENS = 1 << 22
"""Number of tokens to count per read."""


@dataclass(frozen=True)
class EvalSet:
    """A full held-out set in order, with each token predicted once."""

    name: str
    stream: TokenStream
    seq_len: int
    tokenizer: HfTokenizer
    num_documents: int
    """Number of documents that end in the set."""
    text_bytes: int | None = None
    """Number of UTF-8 bytes of the text of the full stream, if known."""
    tags: tuple[str, ...] = ()
    """Names of the groups of sets to average over that include this set."""
    is_text: bool = True
    """False for token ids that were made elsewhere and whose text is not known."""
    first_token: int = 0
    """Position in the stream of the set's first token. Earlier tokens are trained on."""
    stride: int | None = None
    """Number of tokens between the beginnings of consecutive rows; None means `seq_len`. With a smaller stride, each
    row begins with tokens of the previous row, which serve as context and are not predicted a second time."""
    frozen: RowValues | None = None
    """Values of a frozen model for each row, including rows of padding in the last batch; see `Batch.frozen`."""

    @property
    def has_features(self) -> bool:
        """True if each row has features in addition to its tokens, as recordings have."""
        return False

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_id

    @property
    def num_tokens(self) -> int:
        return max(len(self.stream) - self.first_token, 0)

    @property
    def num_rows(self) -> int:
        """Number of rows of the set; the last one may be short."""
        remaining = max(self.num_tokens - self.seq_len, 0)
        return -(-remaining // (self.stride or self.seq_len)) + (self.num_tokens > 0)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Returns the number of UTF-8 bytes of text of each token: float64 [V]; None if the text is unknown.

        If a tokenizer does not reproduce a text exactly (it may prepend a blank), the counts are scaled so that their
        sum is the number of bytes of the text.
        """
        if not self.is_text:
            return None
        counts_V = count_token_bytes(self.tokenizer).astype(np.float64)
        if not self.text_bytes:
            return counts_V
        decoded_bytes = sum(float(counts_V[tokens].sum()) for tokens in self._iter_tokens())
        return counts_V * (self.text_bytes / decoded_bytes) if decoded_bytes else counts_V

    def _iter_tokens(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self.stream), _BLOCK_TOKENS):
            yield self.stream.read(np.array([start]), min(_BLOCK_TOKENS, len(self.stream) - start))[0]

    def stream_positions(self, rows_B: np.ndarray) -> np.ndarray:
        """Returns the position in the stream of each input: int64 [B, S]. Padding is at the stream's end or beyond."""
        starts_B = self.first_token + rows_B.astype(np.int64) * (self.stride or self.seq_len)
        return starts_B[:, None] + np.arange(self.seq_len)

    def count_split_documents(self, ends_D: np.ndarray) -> int:
        """Returns the number of documents whose tokens are predicted in several rows.

        Args:
            ends_D: int64, exclusive end in the stream of each document of the set.
        """
        ends_D = ends_D - self.first_token
        starts_D = np.concatenate([[0], ends_D[:-1]]) if len(ends_D) else ends_D
        stride = self.stride or self.seq_len
        # The rows that predict the first and the last target. With a stride, it is the first row that reaches them.
        first_D, last_D = (np.maximum(inputs_D - self.seq_len, -1) // stride + 1 for inputs_D in (starts_D, ends_D - 2))
        return int(np.count_nonzero(first_D < last_D))

    def with_stride(self, stride: int) -> EvalSet:
        """Returns the same set in overlapping rows, each of which begins `stride` tokens after the previous one."""
        return replace(self, stride=stride, frozen=None)

    def num_batches(self, batch_size: int) -> int:
        """Returns the number of batches of the full set; the last one may hold rows of padding."""
        return -(-self.num_rows // batch_size)

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> Iterator[Batch]:
        """Yields this host's rows of each global batch. Rows past the end of the set are padding.

        Padding has weight 0 and segment -1.

        Args:
            batch_size: number of rows of the global batch.
            rows: numbers of this host's rows in the global batch.
            max_batches: maximum number of batches; None means all.

        Raises:
            UserError: if a batch does not have these rows.
        """
        check_rows(batch_size, rows)
        count = self.num_batches(batch_size)
        # Every host yields the same number of batches, including hosts with rows past the end, because all must run the
        # same steps.
        for index in range(count if max_batches is None else min(count, max_batches)):
            rows_B = index * batch_size + np.asarray(rows, np.int64)
            batch = self._read(rows_B)
            yield batch if self.frozen is None else batch._replace(frozen=self.frozen.read(rows_B))

    def _read(self, rows_B: np.ndarray) -> Batch:
        """Reads rows by their numbers. Rows past the end of the set are padding."""
        stride = self.stride or self.seq_len
        batch = Chunks(self.stream, self.seq_len, self.eos_id, stride, self.first_token).read(rows_B)
        if overlap := self.seq_len - stride:
            batch.weights[rows_B > 0, :overlap] = 0
        return batch


def check_rows(batch_size: int, rows: Sequence[int]) -> None:
    """Checks the row numbers of a host against the batch size.

    Raises:
        UserError: if `rows` is empty, not in order, or out of range.
    """
    ordered = len(rows) > 0 and bool(np.all(np.diff(rows) > 0))
    if not ordered or rows[0] < 0 or rows[-1] >= batch_size:
        raise UserError(f"rows {rows} are no part of a batch of {batch_size}")
