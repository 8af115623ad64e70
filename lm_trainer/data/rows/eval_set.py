"""Held-out sets, read in order.

Shape letters: B rows of this host, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.rows.chunks import Chunks
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.data.tokenizer.token_bytes import token_bytes

_AT_ONCE = 1 << 22
"""Tokens that are counted at a time."""


@dataclass(frozen=True)
class EvalSet:
    """All of a held-out set in order, each token once."""

    name: str
    stream: TokenStream
    seq_len: int
    tokenizer: HfTokenizer
    num_documents: int
    """Documents that end in the set."""
    text_bytes: int | None = None
    """UTF-8 bytes of the text of the whole stream, if they are known."""
    tags: tuple[str, ...] = ()
    """Groups of sets over which averages are taken."""
    is_text: bool = True
    """False for token ids that were made elsewhere, of whose text nothing is known."""
    first_token: int = 0
    """The token of the stream with which the set begins; those before are trained on."""
    stride: int | None = None
    """Tokens from the beginning of a row to that of the next; None: `seq_len`. With fewer, each row begins with tokens
    of the one before, which are read and not predicted again."""

    @property
    def has_features(self) -> bool:
        """True where each row has features beside its tokens, as recordings have."""
        return False

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_id

    @property
    def num_tokens(self) -> int:
        return max(len(self.stream) - self.first_token, 0)

    @property
    def num_rows(self) -> int:
        """Rows of the set; the last one may be short."""
        rest = max(self.num_tokens - self.seq_len, 0)
        return -(-rest // (self.stride or self.seq_len)) + (self.num_tokens > 0)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes of text that each token stands for: float64 [V]; None where nothing is known of the text.

        Where a tokenizer does not keep a text as it is (it may put a blank in front), they are scaled so that they add
        up to the bytes of the text.
        """
        if not self.is_text:
            return None
        counts_V = token_bytes(self.tokenizer).astype(np.float64)
        if not self.text_bytes:
            return counts_V
        found = sum(float(counts_V[tokens].sum()) for tokens in self._tokens())
        return counts_V * (self.text_bytes / found) if found else counts_V

    def _tokens(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self.stream), _AT_ONCE):
            yield self.stream.read(np.array([start]), min(_AT_ONCE, len(self.stream) - start))[0]

    def places_of(self, rows_B: np.ndarray) -> np.ndarray:
        """The place in the stream of each input, int64 [B, S]; the stream's end or more for padding."""
        starts_B = self.first_token + rows_B.astype(np.int64) * (self.stride or self.seq_len)
        return starts_B[:, None] + np.arange(self.seq_len)

    def num_cut(self, ends_D: np.ndarray) -> int:
        """Counts the documents whose tokens are predicted in several rows.

        Args:
            ends_D: int64, the token of the stream after each document of the set.
        """
        ends_D = ends_D - self.first_token
        starts_D = np.concatenate([[0], ends_D[:-1]]) if len(ends_D) else ends_D
        stride = self.stride or self.seq_len
        # The rows in which the first and the last target are predicted: with a stride, the first that reach to them.
        first_D, last_D = (np.maximum(inputs_D - self.seq_len, -1) // stride + 1 for inputs_D in (starts_D, ends_D - 2))
        return int(np.count_nonzero(first_D < last_D))

    def in_order(self, stride: int) -> EvalSet:
        """The set in rows that overlap: each begins `stride` tokens after the one before."""
        return replace(self, stride=stride)

    def num_batches(self, batch_size: int) -> int:
        """Batches of the whole set; the last one may hold rows of padding."""
        return -(-self.num_rows // batch_size)

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
        stride = self.stride or self.seq_len
        chunks, seen = Chunks(self.stream, self.seq_len, self.eos_id, stride, self.first_token), self.seq_len - stride
        count = self.num_batches(batch_size)
        for index in range(count if max_batches is None else min(count, max_batches)):
            rows_B = index * batch_size + np.asarray(rows, np.int64)
            # Every host yields as many batches, even one whose rows lie past the end: all must run the same steps.
            batch = chunks.read(rows_B)
            if seen:
                batch.weights[rows_B > 0, :seen] = 0
            yield batch


def check_rows(batch_size: int, rows: Sequence[int]) -> None:
    """Refuses rows that no batch of that size has.

    Raises:
        UserError: if `rows` is empty, not in order, or reaches beyond the batch.
    """
    ordered = len(rows) > 0 and bool(np.all(np.diff(rows) > 0))
    if not ordered or rows[0] < 0 or rows[-1] >= batch_size:
        raise UserError(f"rows {rows} are no part of a batch of {batch_size}")
