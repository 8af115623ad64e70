"""Documents that do not count: their tokens become padding, and all other tokens keep their places.

Shape letters: B rows, S positions, D documents, N runs of adjacent documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.cache.exclusion import Exclusion, read_exclusions
from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.config import DataConfig
from lm_trainer.data.rows.chunks import PADDING_SEGMENT
from lm_trainer.data.tokenize.open_cache import OpenCache

_KEY = "data.without"


class PlacedRows(Protocol):
    """Rows whose tokens have positions in a stream."""

    @property
    def eos_id(self) -> int: ...

    def stream_positions(self, rows_B: np.ndarray) -> np.ndarray:
        """Returns the position in the stream of each input: int64 [B, S]."""
        ...


@dataclass(frozen=True)
class Uncounted:
    """The documents of one set that do not count."""

    documents: Exclusion
    whole_set: bool = False
    """True if no document of the set counts."""

    @property
    def digest(self) -> str:
        """Hash of the document numbers."""
        return fingerprint("whole set") if self.whole_set else self.documents.digest

    def includes(self, document: int) -> bool:
        """Returns True if a document, counted from 0, does not count."""
        return self.whole_set or bool(np.isin(document, self.documents.documents_N))

    def except_for(self, other: Uncounted) -> Uncounted:
        """Returns the documents of this set that are not in `other`."""
        numbers_N = self.documents.documents_N
        kept_N = numbers_N[:0] if other.whole_set else np.setdiff1d(numbers_N, other.documents.documents_N)
        documents = Exclusion(kept_N, self.documents.made_for, _KEY)
        return Uncounted(documents, whole_set=self.whole_set and not other.whole_set)

    def find_runs(self, name: str, cache: OpenCache) -> tuple[np.ndarray, np.ndarray]:
        """Returns the runs of adjacent documents in the stream of a finished cache.

        Args:
            name: name of the set, for messages.
            cache: cache of the set.

        Returns:
            The first position of each run and the position after its last one, both int64 [N] and increasing.

        Raises:
            UserError: if there is no such document, or a list was made for other data.
        """
        if self.whole_set:
            return np.array([0]), np.array([len(cache.stream)])
        lengths_D = document_lengths(cache.store, cache.ledger)
        self.documents.check_matches_cache(name, cache.ledger, len(lengths_D))
        starts_D = (np.cumsum(lengths_D) - lengths_D)[self.documents.documents_N]
        lengths_D = lengths_D[self.documents.documents_N]
        # A document may also be left out of the stream, by `data.exclude`.
        placed = [cache.position_of(start) for start in starts_D.tolist()]
        kept_D = np.array([position is not None for position in placed], bool)
        starts_D = np.array([position for position in placed if position is not None], np.int64)
        ends_D = starts_D + lengths_D[kept_D]
        first_D = np.concatenate([[True], starts_D[1:] != ends_D[:-1]])[: len(starts_D)]
        last_D = np.concatenate([first_D[1:], [True]])[: len(starts_D)]
        return starts_D[first_D], ends_D[last_D]


def read_uncounted(config: DataConfig) -> dict[str, Uncounted]:
    """Returns the documents that do not count, by name of the set.

    Raises:
        UserError: if a list cannot be read.
    """
    without = config.without
    if without is None:
        return {}
    listed = read_exclusions(without.files, config.sets, _KEY)
    uncounted = {}
    for name in config.sets:
        of_files = listed.get(name, Exclusion(np.zeros(0, np.int64), {}, _KEY))
        numbers_N = np.union1d(of_files.documents_N, np.array(without.numbers_of(name), np.int64))
        if len(numbers_N) or name in without.sets:
            documents = Exclusion(numbers_N, of_files.made_for, _KEY)
            uncounted[name] = Uncounted(documents, whole_set=name in without.sets)
    return uncounted


def uncounted_digests(uncounted: Mapping[str, Uncounted]) -> dict[str, str]:
    """Returns the hash of the documents of each set."""
    return {name: of_set.digest for name, of_set in uncounted.items()}


@dataclass(frozen=True)
class TokenMask:
    """Makes padding of the tokens of some documents.

    Their tokens are replaced by end-of-document tokens, so that a batch does not contain them.
    """

    rows: PlacedRows
    starts_N: np.ndarray
    ends_N: np.ndarray
    """int64 [N]: each run of documents has the positions [start, end) of the stream. Runs are in order."""

    def apply(self, batch: Batch, rows_B: np.ndarray) -> Batch:
        """Returns the batch of some rows without the tokens."""
        positions_BS = self.rows.stream_positions(rows_B)
        inputs_BS, targets_BS = self._is_inside(positions_BS), self._is_inside(positions_BS + 1)
        if not (inputs_BS.any() or targets_BS.any()):
            return batch
        return batch._replace(
            tokens=np.where(inputs_BS, np.int32(self.rows.eos_id), batch.tokens),
            # The target of the last token before a document is the document's first token.
            targets=np.where(targets_BS, np.int32(self.rows.eos_id), batch.targets),
            weights=np.where(inputs_BS | targets_BS, np.float32(0), batch.weights),
            segments=np.where(inputs_BS, np.int32(PADDING_SEGMENT), batch.segments),
        )

    def _is_inside(self, positions_BS: np.ndarray) -> np.ndarray:
        """Returns bool [B, S], true for positions of the stream inside a run."""
        if not len(self.starts_N):
            return np.zeros(positions_BS.shape, bool)
        runs_BS = np.searchsorted(self.starts_N, positions_BS, side="right") - 1
        return (runs_BS >= 0) & (positions_BS < self.ends_N[np.maximum(runs_BS, 0)])
