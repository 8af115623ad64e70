"""Rows of recordings with their text. Each row is one document, with its features and its tokens.

Shape letters: B rows, S positions, T = S + 1, D documents, F frames, M mel channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.audio.augment import SpecAugment
from lm_trainer.data.cache.documents import document_lengths, read_rows
from lm_trainer.data.cache.features import FeatureStream
from lm_trainer.data.formats import AudioFormat, UnusableRow
from lm_trainer.data.rows.chunks import make_batch
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.sources import BadRow, Row, Shard
from lm_trainer.data.tokenize.open_cache import OpenCache


class Features(Protocol):
    """Audio features that can be read by document number."""

    def read_documents(self, documents_N: np.ndarray) -> np.ndarray:
        """Returns float32 [N, F, M]."""
        ...


def open_features(cache: OpenCache, format: AudioFormat) -> Features:
    """Returns the features of a finished cache, either stored or computed from the recordings of its sources."""
    if format.keeps_features:
        return FeatureStream(cache.store, cache.ledger, format.features_shape)
    return _ComputedFeatures(cache, format)


@dataclass(frozen=True)
class _ComputedFeatures:
    cache: OpenCache
    format: AudioFormat

    def read_documents(self, documents_N: np.ndarray) -> np.ndarray:
        """Returns float32 [N, F, M]. Raises `UserError` for a recording that is no longer readable."""
        return np.stack([self._compute_document(int(document)) for document in documents_N])

    def _compute_document(self, document: int) -> np.ndarray:
        location, row = read_source_row(self.cache, document)
        if row is None or isinstance(row, BadRow):
            raise UserError(f"{location}: the recording was there when it was tokenised, and is no more")
        try:
            return self.format.compute_features(row)
        except UnusableRow as error:
            raise UserError(f"{location}: {error}") from None


def read_source_row(cache: OpenCache, document: int) -> tuple[str, Row | BadRow | None]:
    """Returns the location of a document, and its row in the source."""
    ledger = cache.ledger
    ends = np.cumsum(ledger.documents)
    part = int(np.searchsorted(ends, document, side="right"))
    row = int(read_rows(cache.store, ledger, part)[document - (int(ends[part - 1]) if part else 0)])
    shard: Shard = cache.shards[int(ledger.parts[part].partition("-")[0])]
    source_row = next(iter(shard.rows(row)), None)
    return (source_row.where if source_row is not None else f"row {row}"), source_row


@dataclass(frozen=True)
class AudioRows:
    """Rows of one document each. Documents whose text is longer than a row are left out."""

    cache: OpenCache
    features: Features
    documents_R: np.ndarray
    """int64: number of the document of each row."""
    starts_D: np.ndarray
    """int64: the position in the stream of each document's first token."""
    lengths_D: np.ndarray
    """int64: the number of tokens of each document, including its end-of-document token."""
    seq_len: int
    eos_id: int
    features_shape: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return len(self.documents_R)

    def read(self, rows_B: np.ndarray) -> Batch:
        return self.read_padded(rows_B)

    def read_padded(self, rows_B: np.ndarray) -> Batch:
        """Reads rows. Rows past the end are padding, with weight 0, segment -1 and features of 0."""
        valid = np.flatnonzero(rows_B < self.num_rows)
        documents_N = self.documents_R[rows_B[valid]]
        lengths_N = self.lengths_D[documents_N]
        stream, width = self.cache.stream, self.seq_len + 1
        tokens_BT = np.full((len(rows_B), width), self.eos_id, np.int32)
        mask_BT = np.zeros_like(tokens_BT)
        out_starts_N = valid * width
        stream.copy(self.starts_D[documents_N], lengths_N, tokens_BT.reshape(-1), out_starts_N)
        assert stream.loss_mask is not None
        stream.loss_mask.copy(self.starts_D[documents_N], lengths_N, mask_BT.reshape(-1), out_starts_N)
        available_B = np.zeros(len(rows_B), np.int64)
        available_B[valid] = lengths_N
        batch = make_batch(tokens_BT, available_B, self.eos_id, mask_BT)
        features_BFM = np.zeros((len(rows_B), *self.features_shape), np.float32)
        if len(valid):
            features_BFM[valid] = self.features.read_documents(documents_N)
        return batch._replace(features=features_BFM)

    def token_runs(self, row: int) -> list[tuple[int, int]]:
        document = self.documents_R[row]
        return [(int(self.starts_D[document]), int(self.lengths_D[document]))]

    def rows_containing(self, start: int, stop: int) -> np.ndarray:
        starts_R = self.starts_D[self.documents_R]
        return np.flatnonzero((starts_R < stop) & (starts_R + self.lengths_D[self.documents_R] > start))

    def slice_rows(self, first: int, stop: int | None = None) -> AudioRows:
        """Returns the rows [first, stop)."""
        return replace(self, documents_R=self.documents_R[first:stop])


def open_audio_rows(
    title: str, cache: OpenCache, format: AudioFormat, *, seq_len: int, eos_id: int, max_bad: float | None
) -> AudioRows:
    """Opens the rows of a finished cache.

    Args:
        title: title of the set, for messages.
        cache: a finished cache.
        format: data format of the cache.
        seq_len: number of inputs of a row, which is the maximum number of tokens of a text, including its prompt.
        eos_id: token id that fills up rows.
        max_bad: maximum fraction of texts that may be left out because they are too long; None allows none.

    Raises:
        UserError: if too many texts are too long; names the first one.
    """
    lengths_D = document_lengths(cache.store, cache.ledger)
    # The last token is only a target.
    long_D = np.flatnonzero(lengths_D - 1 > seq_len)
    if len(long_D) and (max_bad is None or len(long_D) > max_bad * len(lengths_D)):
        location, tokens = read_source_row(cache, int(long_D[0]))[0], int(lengths_D[long_D[0]]) - 1
        allowed = "" if max_bad is None else f", more than data.max_bad_rows ({max_bad:g}) allows"
        raise UserError(
            f"{title}: {len(long_D)} of {len(lengths_D)} texts are longer than model.seq_len ({seq_len}){allowed}; the "
            f"first is {location} with {tokens} tokens. Shorten them, raise model.seq_len, or set data.on_bad_row: "
            "skip to leave them out"
        )
    documents_R = np.flatnonzero(lengths_D - 1 <= seq_len)
    starts_D = np.cumsum(lengths_D) - lengths_D
    features = open_features(cache, format)
    return AudioRows(cache, features, documents_R, starts_D, lengths_D, seq_len, eos_id, format.features_shape)


@dataclass(frozen=True)
class FeatureMasks:
    """Applies SpecAugment masks to the features of training rows."""

    settings: SpecAugment
    seed: int

    def __call__(self, batch: Batch, positions_B: np.ndarray) -> Batch:
        """Masks the features of a batch, given the position of each row in the run."""
        assert isinstance(batch.features, np.ndarray)
        return batch._replace(features=self.settings.apply(batch.features, self.seed, positions_B))


@dataclass(frozen=True)
class SpeechSet(EvalSet):
    """All rows of a held-out set in order, with their features."""

    audio_rows: AudioRows | None = None

    @property
    def has_features(self) -> bool:
        """See `EvalSet`."""
        return True

    @property
    def num_rows(self) -> int:
        assert self.audio_rows is not None
        return self.audio_rows.num_rows

    def stream_positions(self, rows_B: np.ndarray) -> np.ndarray:
        """See `EvalSet`."""
        assert self.audio_rows is not None
        starts_B = np.full(len(rows_B), len(self.stream), np.int64)
        valid = rows_B < self.audio_rows.num_rows
        starts_B[valid] = self.audio_rows.starts_D[self.audio_rows.documents_R[rows_B[valid]]]
        return starts_B[:, None] + np.arange(self.seq_len)

    def count_split_documents(self, ends_D: np.ndarray) -> int:
        """See `EvalSet`."""
        del ends_D
        return 0

    def _read(self, rows_B: np.ndarray) -> Batch:
        """See `EvalSet`. Padding has features of 0."""
        assert self.audio_rows is not None
        return self.audio_rows.read_padded(rows_B)
