"""The audio features of a cache, which are stored with the tokens of each document.

Shape letters: N documents, F frames, M mel channels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.token_stream import TokenStream


class FeatureStream(TokenStream):
    """The features of all documents in order, as one array of numbers."""

    _kind: ClassVar[str] = "fea"

    def __init__(self, store: KvStore, ledger: Ledger, shape: tuple[int, int]):
        self._shape = shape
        super().__init__(store, ledger, np.dtype("<f4"))

    def _num_items_per_part(self, ledger: Ledger) -> np.ndarray:
        return np.asarray(ledger.documents, np.int64) * (self._shape[0] * self._shape[1])

    def read_documents(self, documents_N: np.ndarray) -> np.ndarray:
        """Reads the features of the given documents: float32 [N, F, M].

        Raises:
            MachineError: if a part is missing or truncated.
        """
        size = self._shape[0] * self._shape[1]
        features_NFM = np.empty((len(documents_N), *self._shape), np.float32)
        starts_N = np.asarray(documents_N, np.int64) * size
        self.copy(starts_N, np.full(len(starts_N), size), features_NFM.reshape(-1), np.arange(len(starts_N)) * size)
        return features_NFM
