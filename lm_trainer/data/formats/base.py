"""Base classes of formats. A format turns a row of a source into tokens and their loss mask.

Shape letters: T tokens of a document, F frames, M mel channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lm_trainer.core.config import Config
from lm_trainer.core.data_content import DataContent
from lm_trainer.data.sources import Row
from lm_trainer.data.tokenizer import Tokenizer

TokenIds = Sequence[int] | np.ndarray
"""Token ids as a list, or as an array of integers [T]."""


class PreparedRow(NamedTuple):
    """A row that is ready to be encoded."""

    value: Any
    """The input for `encode`."""
    size: int
    """Number of UTF-8 bytes of the text; 0 = the row is empty."""
    replaced: bool = False
    """True if characters that are invalid in UTF-8 were replaced."""
    extra_bytes: int = 0
    """Number of bytes of other data that is stored with the tokens."""


class EncodedDocument(NamedTuple):
    """Token ids without BOS and EOS."""

    ids: TokenIds
    """Integers [T]: the token ids."""
    loss_mask: np.ndarray | None = None
    """bool [T]: True for tokens that count as targets in the loss; None = all tokens."""
    features: np.ndarray | None = None
    """float32 [F, M], if the format caches audio features."""
    partner: EncodedDocument | None = None
    """The second document of the row, if rows are pairs of documents. It is stored after this one."""


class UnusableRow(Exception):
    """A row that does not fit the format. The message gives the reason."""


class FormatConfig(Config):
    """Base of every member of the union of formats."""

    has_loss_mask: ClassVar[bool] = False
    """True if documents have a loss mask, in which case they may contain EOS tokens."""
    adds_bos: ClassVar[bool] = True
    """True if documents start with the BOS token, provided that the tokenizer has one."""
    has_prompts: ClassVar[bool] = False
    """True if a row is a prompt with its answer, which must stay in one training row."""
    content: ClassVar[DataContent] = "documents"
    """Contents of the rows, which determines the losses that can be computed on them."""
    later_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys added in later versions. Unset keys are left out of the identity, so that older caches are still found."""

    row_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that determine how documents become training rows. They are left out of the identity of a cache."""

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """Number of frames and channels of the audio features of a document; None if rows have only text."""
        return None

    @property
    def is_paired(self) -> bool:
        """True if every row is stored as two documents, which must stay next to each other."""
        return self.content != "documents"

    def describe_count(self, documents: int) -> str:
        """Describes a number of stored documents, such as `600 documents` or `300 pairs`."""
        return f"{documents // (2 if self.is_paired else 1):,} {self.content}"

    @property
    def keeps_features(self) -> bool:
        """True if the cache stores features with the tokens."""
        return False

    def settings_for_cache(self) -> dict[str, object]:
        """Returns the settings that determine the bytes of a cache."""
        return self.model_dump(exclude={*(self.later_keys - self.changed_fields), *self.row_keys})

    def notes(self, tokenizer: Tokenizer) -> list[str]:
        """Returns notes for the user about the format with this tokenizer, which are shown when a cache is built."""
        del tokenizer
        return []

    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Returns the names of the fields to read from a record; () = only its text."""

    @abstractmethod
    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        """Returns JSON that changes whenever the tokens may change; None for plain text.

        Raises:
            UserError: if the format cannot be used with the tokenizer.
        """

    @abstractmethod
    def prepare(self, row: Row) -> PreparedRow:
        """Checks a row, and returns it as input for `encode`.

        Raises:
            UnusableRow: if the row does not fit the format.
        """

    @abstractmethod
    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        """Encodes prepared values.

        Returns one result per value. It is an UnusableRow if encoding the row shows that it is bad.
        """
