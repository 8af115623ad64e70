"""A token stream without excluded documents, as if they had never been tokenised.

Shape letters: N reads, R runs of retained documents, P pieces of reads, D documents.
"""

from __future__ import annotations

import numpy as np

from lm_trainer.data.cache.documents import document_lengths
from lm_trainer.data.cache.exclusion import Exclusion
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_stream import TokenStream


class FilteredStream(TokenStream):
    """The retained documents of a stream, in order. Empty until the cache is finished.

    Args:
        store: store of the cache.
        ledger: the current ledger of the cache.
        stream: the full token stream of the cache.
        exclusion: the excluded documents.
        name: name of the set, for messages.

    Raises:
        UserError: if an exclusion list was made for other data.
    """

    def __init__(self, store: KvStore, ledger: Ledger, stream: TokenStream, exclusion: Exclusion, name: str):
        self.whole, self._store, self._exclusion, self._name = stream, store, exclusion, name
        self.loss_mask = None
        self._set_runs(np.zeros(0, np.int64), np.zeros(0, np.int64))
        self.lengths_D = np.zeros(0, np.int64)
        """int64: number of tokens of each retained document."""
        self.extend(ledger)

    def extend(self, ledger: Ledger) -> None:
        """Adds a cache once it is finished. Until then, exclusion lists cannot be checked against its documents."""
        self.whole.extend(ledger)
        if not ledger.finished:
            return
        lengths_D = document_lengths(self._store, ledger)
        self._exclusion.check_matches_cache(self._name, ledger, len(lengths_D))
        retained_D = np.ones(len(lengths_D), bool)
        retained_D[self._exclusion.documents_N] = False
        starts_D = np.cumsum(lengths_D) - lengths_D
        # A run consists of consecutive retained documents.
        first_D = retained_D & ~np.concatenate([[False], retained_D[:-1]])
        runs_D = np.cumsum(first_D)[retained_D] - 1
        counts_R = np.bincount(runs_D, lengths_D[retained_D], minlength=int(first_D.sum())).astype(np.int64)
        self.lengths_D = lengths_D[retained_D]
        if self.whole.loss_mask is not None:
            self.loss_mask = _SelectedRuns(self.whole.loss_mask, starts_D[first_D], counts_R)
        self._set_runs(starts_D[first_D], counts_R)

    def _set_runs(self, origins_R: np.ndarray, counts_R: np.ndarray) -> None:
        self._origins_R = origins_R
        self._ends = np.cumsum(counts_R)
        self._begins_R = self._ends - counts_R

    def copy(self, starts_N: np.ndarray, counts_N: np.ndarray, out: np.ndarray, out_starts_N: np.ndarray) -> None:
        """See `TokenStream`."""
        reads_P, starts_P, counts_P, offsets_P = self.map_to_full_stream(starts_N, counts_N)
        self.whole.copy(starts_P, counts_P, out, np.asarray(out_starts_N)[reads_P] + offsets_P)

    def map_to_full_stream(
        self, starts_N: np.ndarray, counts_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Maps runs of tokens to positions in the full stream.

        Args:
            starts_N: int64 [N], first token of each run.
            counts_N: int64 [N], number of tokens of each run.

        Returns:
            For each piece, the index of its run, its first token in the full stream, its number of tokens, and its
            offset within the run: each int64 [P].
        """
        nonempty = np.flatnonzero(np.asarray(counts_N))
        starts_N, counts_N = np.asarray(starts_N, np.int64)[nonempty], np.asarray(counts_N, np.int64)[nonempty]
        firsts_N = np.searchsorted(self._ends, starts_N, side="right")
        pieces_N = np.searchsorted(self._ends, starts_N + counts_N - 1, side="right") - firsts_N + 1
        reads_P = np.repeat(np.arange(len(nonempty)), pieces_N)
        runs_P = np.arange(len(reads_P)) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N) + firsts_N[reads_P]
        low_P = np.maximum(self._begins_R[runs_P], starts_N[reads_P])
        high_P = np.minimum(self._ends[runs_P], (starts_N + counts_N)[reads_P])
        starts_P = self._origins_R[runs_P] + low_P - self._begins_R[runs_P]
        return nonempty[reads_P], starts_P, high_P - low_P, low_P - starts_N[reads_P]

    def position_of(self, token: int) -> int | None:
        """Maps a position in the full stream to the position in this stream; None if its document is excluded."""
        run = int(np.searchsorted(self._origins_R, token, side="right")) - 1
        if run < 0:
            return None
        position = token - int(self._origins_R[run]) + int(self._begins_R[run])
        return position if position < self._ends[run] else None


class _SelectedRuns(FilteredStream):
    """The same runs of another stream of the cache, such as the loss mask."""

    def __init__(self, stream: TokenStream, origins_R: np.ndarray, counts_R: np.ndarray):
        self.whole, self.loss_mask = stream, None
        self._set_runs(origins_R, counts_R)

    def extend(self, ledger: Ledger) -> None:
        """Does nothing, since the runs are final."""
        del ledger
