"""The order of training over caches that are still being built.

The row at a position never depends on the state of a cache, because readers wait until the row is final.

Shape letters: N positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.rows.order import TrainOrder
from lm_trainer.data.tokenize.background import interpreter_ending
from lm_trainer.data.tokenize.open_cache import MissingTokens, OpenCache

POLL_SECONDS = 0.05


class GrowingOrder:
    """The order of training over sets, some of which may still be growing.

    Args:
        current_order: function that returns the order as far as it is currently final.
        caches: the caches, keyed by set name.
        need_all: True if every set must be complete before the first row, since the sets' ends decide the length.
        closed: event that ends all waiting once it is set.
    """

    def __init__(
        self,
        current_order: Callable[[], TrainOrder],
        caches: Mapping[str, OpenCache],
        *,
        need_all: bool = False,
        closed: threading.Event,
    ):
        self._current_order, self._caches, self._need_all, self._closed = current_order, caches, need_all, closed
        # Stored between calls, and refreshed only when needed. It may lag behind the caches, but it is never wrong,
        # because a final row never changes.
        self._order: TrainOrder | None = None

    @property
    def growing(self) -> bool:
        """True if any set was still growing when the order was last refreshed."""
        return self._order is None or not all(train.final for train in self._order.sets)

    def missing_tokens(self, positions_N: np.ndarray) -> MissingTokens | None:
        """Describes the tokens that are missing until the rows at these positions are final; None if none are.

        Raises:
            UserError: if they will never arrive because their build failed.
        """
        if self._order is None or self._order.blocking_set(positions_N, need_all=self._need_all):
            self._order = self._current_order()
        if (blocking := self._order.blocking_set(positions_N, need_all=self._need_all)) is None:
            return None
        train, rows = blocking
        cache, seq_len = self._caches[train.name], train.rows.seq_len
        cache.raise_if_failed()
        return cache.missing_tokens(None if rows is None else rows * seq_len, have=train.num_rows * seq_len)

    def read(self, positions_N: np.ndarray) -> Batch:
        """Waits until the rows at the given positions are final, and returns them.

        Raises:
            UserError: see `missing_tokens`.
        """
        while self.missing_tokens(positions_N) is not None:
            # This waits in a thread of Grain, which neither `close` nor the end of the interpreter could interrupt.
            if self._closed.wait(POLL_SECONDS) or interpreter_ending.is_set():
                raise RuntimeError("the iterator of batches has been closed")
        assert self._order is not None
        return self._order.read(positions_N)
