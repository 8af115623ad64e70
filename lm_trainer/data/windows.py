"""Cuts the token stream into rows of a batch. Window i of length S is the tokens [iS, (i+1)S).

Shape letters: B rows, R the rows with more than one document, S positions, T = S + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.stream import TokenStream

PADDING_SEGMENT = -1


@dataclass(frozen=True)
class Windows:
    """The whole windows of a stream, as rows to train on."""

    stream: TokenStream
    seq_len: int
    eos_id: int

    @property
    def num_rows(self) -> int:
        return len(self.stream) // self.seq_len

    def read(self, rows_B: np.ndarray) -> Batch:
        return read_windows(self.stream, rows_B, self.seq_len, self.eos_id)


def read_windows(stream: TokenStream, windows_B: np.ndarray, seq_len: int, eos_id: int) -> Batch:
    """The rows of some windows; a window beyond the end of the stream is all padding.

    Args:
        stream: the tokens.
        windows_B: int [B], numbers of windows.
        seq_len: S.
        eos_id: ends every document of the stream.
    """
    starts_B = np.asarray(windows_B, np.int64) * seq_len
    there_B = starts_B < len(stream)
    if there_B.all():
        tokens_BT = stream.read(starts_B, seq_len + 1, fill=eos_id)
    else:
        tokens_BT = np.full((len(starts_B), seq_len + 1), eos_id, np.int32)
        tokens_BT[there_B] = stream.read(starts_B[there_B], seq_len + 1, fill=eos_id)
    return make_batch(tokens_BT, np.maximum(len(stream) - starts_B, 0), eos_id)


def make_batch(tokens_BT: np.ndarray, available_B: np.ndarray, eos_id: int) -> Batch:
    """Splits rows of S + 1 tokens into inputs and targets, and marks documents.

    An EOS belongs to the document that it ends; predicting the first token of the next document from it has no weight.

    Args:
        tokens_BT: int32 [B, T].
        available_B: int [B], how many tokens of each row are real; the rest is padding.
        eos_id: ends every document.
    """
    tokens_BS, targets_BS = tokens_BT[:, :-1], tokens_BT[:, 1:]
    columns_S = np.arange(tokens_BS.shape[1], dtype=np.int32)
    weights_BS = np.ones(tokens_BS.shape, np.float32)
    segments_BS = np.zeros(tokens_BS.shape, np.int32)
    positions_BS = np.empty(tokens_BS.shape, np.int32)
    positions_BS[:] = columns_S
    ends_BS = tokens_BS == eos_id
    # Most rows lie within one document, and are done.
    rows_R = np.flatnonzero(ends_BS.any(axis=1))
    if len(rows_R):
        ends_RS = ends_BS[rows_R]
        weights_BS[rows_R] = ~ends_RS
        segments_BS[rows_R, 1:] = np.cumsum(ends_RS[:, :-1], axis=1)
        first_RS = np.zeros(ends_RS.shape, np.int32)
        np.multiply(ends_RS[:, :-1], columns_S[1:], out=first_RS[:, 1:])
        positions_BS[rows_R] = columns_S - np.maximum.accumulate(first_RS, axis=1)
    short = np.flatnonzero(available_B < tokens_BT.shape[1])
    if len(short):
        left_B1 = np.asarray(available_B)[short, None]
        weights_BS[short] *= columns_S + 1 < left_B1
        segments_BS[short] = np.where(columns_S < left_B1, segments_BS[short], PADDING_SEGMENT)
    return Batch(tokens_BS, targets_BS, weights_BS, positions_BS, segments_BS)
