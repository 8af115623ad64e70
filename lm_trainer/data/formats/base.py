"""Base of formats: a format turns a row of a source into tokens, and says which of them the loss counts.

Shape letters: T tokens of a document, F frames, M mel channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lm_trainer.core.config import Config
from lm_trainer.data.sources import Row
from lm_trainer.data.tokenizer import Tokenizer


class PreparedRow(NamedTuple):
    """A row that is ready to be encoded."""

    value: Any
    """Input of `encode`."""
    size: int
    """UTF-8 bytes of the text; 0 = nothing to encode, the row is empty."""
    replaced: bool = False
    """True if characters that no UTF-8 can hold were replaced."""
    beside: int = 0
    """Bytes of what the cache keeps beside its tokens."""


class EncodedDocument(NamedTuple):
    """Token ids, without those that start and end a document."""

    ids: Any
    """Integers [T]."""
    loss_mask: np.ndarray | None = None
    """bool [T]: the tokens that the loss counts as targets; None = all of them."""
    features: np.ndarray | None = None
    """float32 [F, M], where the format keeps what a model hears."""


class UnusableRow(Exception):
    """Row that does not fit the format; the message says why."""


class FormatConfig(Config):
    """Base of every member of the union of formats."""

    has_loss_mask: ClassVar[bool] = False
    """True if documents have a loss mask; they may then hold the end-of-document token inside."""
    adds_bos: ClassVar[bool] = True
    """True if a start-of-document token is put in front where the tokenizer has one."""
    is_answered: ClassVar[bool] = False
    """True if a row is a prompt and its answer, which belong into one row of training."""
    later: ClassVar[frozenset[str]] = frozenset()
    """Keys that came later: a cache that was built before them is still found where they change nothing."""

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """Frames and channels of what a model hears with each document; None: rows are text alone."""
        return None

    @property
    def keeps_features(self) -> bool:
        """True if the cache holds features beside tokens."""
        return False

    def cached_settings(self) -> dict[str, Any]:
        """The settings that decide the bytes of a cache."""
        return self.model_dump(exclude=set(self.later - self.changed_fields))

    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Names the fields of a record that are read; () = its text alone."""

    @abstractmethod
    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """Returns JSON that changes whenever the tokens may; None for plain text.

        Raises:
            UserError: if the tokenizer does not fit.
        """

    @abstractmethod
    def prepare(self, row: Row) -> PreparedRow:
        """Checks a row and makes the input of `encode`.

        Raises:
            UnusableRow: if the row does not fit.
        """

    @abstractmethod
    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        """Encodes values: one result for each, UnusableRow where only encoding shows that a row does not fit."""
