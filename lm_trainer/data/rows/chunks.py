"""Splits the token stream into rows of equal length. Chunk i of length S has the tokens [iS, (i+1)S).

No token is cropped and no position is padded, except for fewer than S tokens after the last full chunk. In return,
documents are split: when one continues in the next row, the model does not see its tokens before the split. On the
embedded corpus with its own tokenizer and rows of 2,048, this affects 67 % of the documents; `lmt data stats` prints
the share for any data. Within a row, attention and positions restart with each document. `packing.py` splits fewer
documents and pads instead.

Shape letters: B rows, S positions, T = S + 1, N ends or starts of documents, M documents or pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.cache.loss_mask import DOCUMENT_END, IN_LOSS
from lm_trainer.data.cache.token_stream import TokenStream

PADDING_SEGMENT = -1


@dataclass(frozen=True)
class Chunks:
    """The full chunks of a stream, as rows to train on."""

    stream: TokenStream
    seq_len: int
    eos_id: int
    stride: int | None = None
    """Number of tokens between the beginnings of consecutive chunks; None means `seq_len`."""
    first_token: int = 0
    """Position in the stream of the first token of chunk 0."""

    def chunk_starts(self, rows_B: np.ndarray) -> np.ndarray:
        """Returns the position in the stream of each chunk's first token: int64 [B]."""
        return self.first_token + np.asarray(rows_B, np.int64) * (self.stride or self.seq_len)

    def stream_positions(self, rows_B: np.ndarray) -> np.ndarray:
        """Returns the position in the stream of each input: int64 [B, S]."""
        return self.chunk_starts(rows_B)[:, None] + np.arange(self.seq_len)

    @property
    def num_rows(self) -> int:
        return len(self.stream) // self.seq_len

    def read(self, rows_B: np.ndarray) -> Batch:
        return read_mixed([(np.arange(len(rows_B)), self, rows_B)])

    def token_runs(self, row: int) -> list[tuple[int, int]]:
        return [(row * self.seq_len, self.seq_len)]

    def rows_containing(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start // self.seq_len, min(-(-stop // self.seq_len), self.num_rows), dtype=np.int64)


def read_mixed(parts: Sequence[tuple[np.ndarray, Chunks, np.ndarray]]) -> Batch:
    """Reads one batch from the chunks of several streams with the same S and EOS.

    A chunk past the end of its stream is all padding.

    Args:
        parts: for each stream, the rows of the batch to fill, its chunks, and the chunk numbers of these rows.
    """
    seq_len, eos_id = parts[0][1].seq_len, parts[0][1].eos_id
    rows = sum(len(indices) for indices, _, _ in parts)
    # All arrays share a single block, because the allocator reuses a block of this size without new page faults, which
    # would cost several times as much as filling the block.
    block = np.empty(rows * (4 * seq_len + 1), np.int32)
    tokens_BT = block[3 * rows * seq_len :].reshape(rows, seq_len + 1)
    masked = any(chunks.stream.loss_mask is not None for _, chunks, _ in parts)
    mask_BT = np.empty_like(tokens_BT) if masked else None
    available_B = np.empty(rows, np.int64)
    for indices, chunks, numbers in parts:
        stream, starts_N = chunks.stream, chunks.chunk_starts(numbers)
        available_B[indices] = np.maximum(len(stream) - starts_N, 0)
        _read_runs(stream, starts_N, tokens_BT, indices, fill=eos_id)
        if mask_BT is not None and stream.loss_mask is not None:
            _read_runs(stream.loss_mask, starts_N, mask_BT, indices, fill=0)
        elif mask_BT is not None:
            # A stream without a mask is mixed with a masked one: all its tokens count, and only EOS ends documents.
            mask_BT[indices] = np.where(tokens_BT[indices] == eos_id, IN_LOSS | DOCUMENT_END, IN_LOSS)
    outputs = block[: 3 * rows * seq_len].reshape(3, rows, seq_len)
    return make_batch(tokens_BT, available_B, eos_id, mask_BT, out=outputs)


def _read_runs(stream: TokenStream, starts_N: np.ndarray, out_BT: np.ndarray, rows_N: np.ndarray, fill: int) -> None:
    """Reads runs of T tokens into rows. A run may begin or end past the end of the stream."""
    length = out_BT.shape[1]
    counts_N = np.clip(len(stream) - starts_N, 0, length)
    out_BT[rows_N[counts_N < length]] = fill
    nonempty = np.flatnonzero(counts_N)
    stream.copy(starts_N[nonempty], counts_N[nonempty], out_BT.reshape(-1), rows_N[nonempty] * length)


def make_batch(
    tokens_BT: np.ndarray,
    available_B: np.ndarray,
    eos_id: int,
    mask_BT: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> Batch:
    """Splits rows of S + 1 tokens into inputs and targets, and numbers their documents and positions.

    An EOS belongs to the document that it ends. As an input, it has no weight, as its target is in the next document.

    Args:
        tokens_BT: int32 [B, T].
        available_B: int [B], number of real tokens of each row; the remainder is padding.
        eos_id: token id that ends every document, unless `mask_BT` marks the ends of documents.
        mask_BT: int [B, T], mask values (see `loss_mask.py`). A target has weight only if its mask has IN_LOSS.
        out: int32 [3, B, S], filled with weights (as float32), positions and segments.
    """
    rows, seq_len = tokens_BT.shape[0], tokens_BT.shape[1] - 1
    block = np.empty((3, rows, seq_len), np.int32) if out is None else out
    weights_BS, positions_BS, segments_BS = block[0].view(np.float32), block[1], block[2]
    weights_BS.fill(1)
    ends_BT = tokens_BT == eos_id
    if mask_BT is not None:
        ends_BT = (mask_BT & DOCUMENT_END) != 0
        # Shifted by one, because the mask refers to the predicted token, not to the input.
        weights_BS *= (mask_BT[:, 1:] & IN_LOSS) != 0
    end_rows_N, columns_N = np.divmod(np.flatnonzero(ends_BT), seq_len + 1)
    # An end in the last column is only a target, and the token after it is in the next row.
    ends_N = (end_rows_N * seq_len + columns_N)[columns_N < seq_len]
    weights_BS.reshape(-1)[ends_N] = 0
    # An end in the last input column marks the first position of the next row, which always starts a document.
    fill_positions_and_segments(ends_N + 1, positions_BS, segments_BS)
    short = np.flatnonzero(available_B < tokens_BT.shape[1])
    if len(short):
        left_B1 = np.asarray(available_B)[short, None]
        columns_S = np.arange(seq_len)
        weights_BS[short] *= columns_S + 1 < left_B1
        segments_BS[short] = np.where(columns_S < left_B1, segments_BS[short], PADDING_SEGMENT)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], weights_BS, positions_BS, segments_BS)


def fill_positions_and_segments(starts_N: np.ndarray, positions_BS: np.ndarray, segments_BS: np.ndarray) -> None:
    """Fills in the positions and segments of rows, given the beginnings of documents.

    Args:
        starts_N: int [N], flat indices into [B, S] of the first tokens of documents, increasing; the first position of
            a row may be omitted.
        positions_BS: int32, filled with the position in the document, from 0.
        segments_BS: int32, filled with the number of the document in the row, from 0.
    """
    size, seq_len = positions_BS.size, positions_BS.shape[1]
    firsts_B = np.arange(0, size, seq_len)
    starts_M = np.union1d(firsts_B, starts_N[starts_N < size])
    lengths_M = np.diff(starts_M, append=size)
    # The global number of each document minus the number of the first document in its row.
    numbers_M = np.arange(len(starts_M)) - np.searchsorted(starts_M, firsts_B)[starts_M // seq_len]
    # Filling one run at a time is several times as fast as cumulative sums over every token.
    positions_BS[:] = np.arange(seq_len, dtype=np.int32)
    positions = positions_BS.reshape(-1)
    np.subtract(positions, np.repeat((starts_M % seq_len).astype(np.int32), lengths_M), out=positions)
    segments_BS.reshape(-1)[:] = np.repeat(numbers_M.astype(np.int32), lengths_M)
